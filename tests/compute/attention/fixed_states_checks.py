"""Recurrent states of fixed steps against those of steps by themselves, on any device."""

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.step_states import step_states
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.memory.page_memory import DeviceMemory
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.memory.state_arena import StateArena
from deltaserve.core.ids import PageId, PoolId, RowId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, HeadBlock, PageGroup, StateGroup

PAGE_SIZE, NUM_LINES, LINE_PAGES, ROOM = 4, 6, 5, 5
STATES = PoolId(1)
STEPS = (
    {0: 3, 1: 9, 2: 14, 3: 1},
    {0: 4, 1: 10, 2: 15},  # row 3 has left; row 0 begins a page
    {4: 0, 0: 5, 2: 16, 1: 11},  # row 4 joins, row 2 begins a page
    {4: 1},
    {3: 7, 4: 8, 5: 12, 1: 0, 2: 17},
)
"""Row |-> position of each step, in the order of its rows."""


class StatesWorld:
    """Slots in disorder, rows as the device keeps them, and what was recorded of a step over two groups of states."""

    def __init__(self, device: str, recorder: StepRecorder, ssm: DType) -> None:
        key, value = HeadBlock(2, 2 * 3, 4), HeadBlock(4, 2 * 3, 5)
        state = HeadBlock(4, 2, 1100)  # more elements than one program moves, and no power of two
        groups = StateGroup("conv", 2, (key, key, value), DType.BFLOAT16), StateGroup("ssm", 2, (state,), ssm)
        cache = CacheSpec(PAGE_SIZE, (PageGroup("kv", 1, 1, 8, DType.FLOAT32), *groups))
        self.device, num_slots = torch.device(device), NUM_LINES * LINE_PAGES
        self.pool = DeviceMemory(cache, (num_slots, num_slots), self.device).kv
        self.tables = PageTable(cache.num_pools, NUM_LINES, LINE_PAGES)
        order = np.random.default_rng(0).permutation(num_slots).reshape(NUM_LINES, LINE_PAGES)
        for line, slots in enumerate(order.tolist()):
            self.tables.write(STATES, line, 0, tuple(map(PageId, slots)))
        self.rows = ResidentRows(self.tables, cache.num_pools, NUM_LINES, self.device)
        self.rows.forget()  # it is told all pages
        fixed: Any = importlib.import_module("deltaserve.compute.attention.triton.fixed_states")
        on_device, moves = self.rows.on_device(ROOM), fixed.StateMoves()
        self.states = [
            fixed.FixedStates(arena, on_device, on_device.tables[STATES], PAGE_SIZE, moves) for arena in self._arenas
        ]
        self.values = [[self._random(block.shape[1:]) for block in arena.load(0, self._none)] for arena in self._arenas]
        self.loaded: list[tuple[Tensor, ...]] = []
        self.tell(STEPS[0])
        before = self.content()
        with self.rows.standing():
            self.replay = recorder.record(self._run)
        assert all(map(torch.equal, self.content(), before)), "a recording stores nothing"

    @property
    def _arenas(self) -> tuple[StateArena, ...]:
        return self.pool.state_arenas

    @property
    def _none(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self.device)

    def _random(self, shape: torch.Size) -> Tensor:
        """States [ROOM, heads, rows, width], in no order of memory."""
        heads, rows, width = shape
        return torch.randn((ROOM, rows, heads, width)).to(self.device).transpose(1, 2)

    def tell(self, step: dict[int, int]) -> None:
        lines = tuple(map(RowId, step))
        self.rows.prepare(DecodingRows(lines, np.array(list(step.values())), {}, (), 16))

    def content(self) -> list[Tensor]:
        return [arena.bytes.clone() for arena in self._arenas]

    def _run(self) -> None:
        self.loaded.clear()
        for states, values in zip(self.states, self.values, strict=True):
            states.plan()
            for layer in range(2):
                self.loaded.append(states.load(layer))
                states.store(layer, *values)

    def check(self, step: dict[int, int]) -> None:
        """Slots hold anything, and of rows at position 0 what is no number."""
        for arena in self._arenas:
            elements = arena.bytes.view(torch.float32)
            elements.copy_(torch.randn(elements.shape))
            for line in [line for line, position in step.items() if not position]:
                arena.pages[int(self.tables.table(STATES)[line, 0])].fill_(0xFF)
        before, num_rows = self.content(), len(step)
        batch = Batch(tuple(Query(line, position, 1) for line, position in step.items()), 16)
        want, found = [], step_states(self.pool, self.tables, batch)
        for states, values in zip(found, self.values, strict=True):
            assert (states.single_tokens, states.undecided) == (num_rows, ())
            for layer in range(2):
                want.append(states.load(layer))
                states.store(layer, *(of_block[:num_rows] for of_block in values))
        after = self.content()
        for arena, kept in zip(self._arenas, before, strict=True):
            arena.bytes.copy_(kept)
        self.tell(step)
        self.replay()
        assert all(map(torch.equal, self.content(), after)), step
        for got, of_torch in zip(self.loaded, want, strict=True):
            for block, expected in zip(got, of_torch, strict=True):
                assert torch.equal(_bits(block[:num_rows]), _bits(expected)), step
                assert not block[num_rows:].any()


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def check_fixed_states(device: str, recorder: StepRecorder, ssm: DType) -> None:
    """One recorded step is each of STEPS: rows that join, leave and begin pages, and fewer than there is room for."""
    world = StatesWorld(device, recorder, ssm)
    assert [states.single_tokens for states in world.states] == [ROOM] * 2
    for step in STEPS:
        world.check(step)
