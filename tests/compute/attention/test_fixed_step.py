"""Steps of fixed size: recorded once, each further step by the contents of buffers alone, with the bits of one that was
begun for it."""

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.plan import TileSize, WorkTiles, plan_work
from deltaserve.compute.attention.triton.work_buffer import WorkBuffer, WorkCapacity
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import POOL, Shape, World
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, interpreting_process, needs_triton, run_in

SHAPE = Shape(num_layers=1, uses_triton=True)
ROOM = 6
FIELDS = ("positions", "first_parts", "part_starts", "write_pages", "tokens", "pages")


@pytest.fixture(scope="module")
def process() -> Iterator[KernelProcess]:
    yield from interpreting_process()


# ---------------------------------------------------------------- the buffer


def work_of(seed: int, num_rows: int) -> WorkTiles:
    draw = random.Random(seed)
    table = np.arange(8 * 80, dtype=np.int32).reshape(8, 80)
    queries = tuple(Query(row, draw.randint(64, 300), 1) for row in range(num_rows))
    shared = (Shared(0, 32, tuple(range(num_rows))),) if num_rows > 1 else ()
    return plan_work(Batch(queries, 16, shared), table, 4, 2, None, (TileSize(16, 32), TileSize(64, 32)))


def check_fields(buffer: WorkBuffer, work: WorkTiles) -> None:
    counts = (buffer.num_tokens, buffer.num_short, buffer.num_long)
    assert [int(count) for count in counts] == [len(work.positions), len(work.short), len(work.long)]
    assert buffer.short[: work.short.size].tolist() == work.short.reshape(-1).tolist()
    for name in FIELDS:
        values = getattr(work, name)
        assert getattr(buffer, name)[: len(values)].tolist() == values.tolist(), name
    beyond = buffer.part_starts[len(work.part_starts) :]
    assert set(beyond.tolist()) <= {int(work.part_starts[-1])}


def test_a_buffer_holds_one_step_after_the_other_at_the_same_places() -> None:
    capacity = WorkCapacity(tokens=8, results=200, short=200, long=0, listed=24, pages=8 * 80)
    buffer = WorkBuffer.empty(capacity, torch.device("cpu"))
    places = [getattr(buffer, name).data_ptr() for name in (*FIELDS, "short", "num_short")]
    for seed, num_rows in enumerate((8, 1, 5, 8)):
        work = work_of(seed, num_rows)
        buffer.fill(work)
        check_fields(buffer, work)
        work.short[:], work.positions[:], work.pages[:] = 0, 0, 0
        assert buffer.positions[:num_rows].min() > 0, "memory of the host"
    assert [getattr(buffer, name).data_ptr() for name in (*FIELDS, "short", "num_short")] == places
    assert not any((place - places[0]) % 16 for place in places)


def test_a_buffer_of_one_step_has_room_for_that_alone() -> None:
    work = work_of(1, 5)
    buffer = WorkBuffer.of(work, torch.device("cpu"))
    check_fields(buffer, work)
    assert buffer.capacity == WorkCapacity.of(work)
    with pytest.raises(ValueError, match="a step that needs"):
        buffer.fill(work_of(1, 6))


# ---------------------------------------------------------------- the tape bites


def check_tape() -> None:
    numbers, of_host, found = torch.arange(4), [10], torch.zeros(4, dtype=torch.int64)

    def run() -> None:
        found.copy_((numbers + of_host[0]).view(2, 2).flatten())

    replay = StepTape().record(run)
    numbers += 1
    of_host[0] = 1000
    replay()
    assert found.tolist() == [11, 12, 13, 14]
    waiting: tuple[Callable[[], Any], ...] = (
        found[0].item,
        found.nonzero,
        lambda: found[found > 12],
        lambda: torch.tensor([1]),
    )
    for waits in waiting:
        with pytest.raises(RuntimeError, match="in a step that is recorded"):
            StepTape().record(waits)


@needs_triton
def test_a_tape_keeps_what_is_no_memory_and_refuses_to_wait(process: KernelProcess) -> None:
    run_in(process, check_tape)


# ---------------------------------------------------------------- steps by Triton's kernels


class FixedWorld(World):
    """A world of rows that decode: their tokens are computed by `begin_step`, and by what was recorded of another
    step."""

    def values(self, batch: Batch) -> list[Tensor]:
        """Values of each plane [T, H, D] of the step's own tokens."""
        return list(torch.cat([self.kv[q.line][0, :, q.q_start : q.q_end] for q in batch.queries], 1))

    def decoding(self, lens: Sequence[int], rows: Sequence[int]) -> Batch:
        return Batch(tuple(Query(row, lens[row] - 1, 1) for row in rows), self.shape.split_tokens)


def spoil(work: WorkBuffer) -> None:
    """Behind a step's tiles stand some that would write nothing over the results of its first."""
    tiles = work.short.view(-1, 8)
    beyond = tiles[int(work.num_short) :]
    beyond[:] = tiles[0]
    beyond[:, 5] = beyond[:, 3]


class Recorded:
    """One step of ROOM rows, whatever these are, on one layer."""

    def __init__(self, world: World, batch: Batch, sinks: Tensor | None, recorder: StepRecorder) -> None:
        kernels = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
        backend = world.backend
        assert isinstance(backend, kernels.TritonAttention)
        self.world, self.sinks = world, sinks
        self.step = backend.fixed_step(batch, ROOM)
        num_planes = world.pool.page_arenas[0].layout.group.planes
        self.q, self.out = world.random_q(ROOM), torch.empty(0)
        planes = (ROOM, world.shape.kv_heads, world.shape.head_dim)
        self.planes = [torch.randn(planes).to(self.q) for _ in range(num_planes)]
        self.replay = recorder.record(self._run)

    def _run(self) -> None:
        (attention,) = self.step.attention
        attention.write_kv(0, *self.planes)
        self.out = attention.attend(0, self.q, self.world.shape.head_dim**-0.5, self.sinks)

    def attend(self, batch: Batch, planes: Sequence[Tensor], q: Tensor) -> Tensor:
        """[T, Hq, Dv]. Rows that the step does not have are given NaN, and must write nothing and get 0."""
        assert self.step.fill(batch)
        spoil(self.step.attention[0].work)
        num_rows = len(batch.queries)
        for target, values in zip((self.q, *self.planes), (q, *planes), strict=True):
            target.fill_(float("nan"))
            target[:num_rows] = values
        table = self.world.tables.table(POOL)
        kept = table.copy()
        table.fill(self.world.pool.num_pages[0] - 1)  # who reads it now reads what another step will find there
        self.replay()
        table[:] = kept
        assert self.out[num_rows:].eq(0).all()
        return self.out[:num_rows].clone()


def check_on_tape(shape: Shape, sinks: Tensor | None = None) -> None:
    check_recorded(shape, StepTape(), sinks)


def check_recorded(shape: Shape, recorder: StepRecorder, sinks: Tensor | None = None) -> None:
    """Steps of other rows, lengths, pages and shared runs than that which was recorded; and fewer of them."""
    common = (0, 192, 128, 192, 192, 64)
    most = (260, 255, 190, 333, 230, 222)
    world = FixedWorld(shape, most, common)
    world.fill((1,) * len(most))
    recorded = Recorded(world, world.decoding(most, range(6)), sinks, recorder)
    draw, memory = random.Random(1), world.pool.page_arenas[0].bytes
    for num_rows in (5, 1, 6):
        rows = draw.sample(range(6), num_rows)
        lens = [draw.randint(max(1, common[row]) + 1, most[row]) for row in range(6)]
        private = world.decoding(lens, rows)
        readers = tuple(r for r in range(num_rows) if lens[rows[r]] > 128 and (rows[r] == 0 or common[rows[r]] >= 128))
        runs = [(), (Shared(0, 128, readers),)] if len(readers) > 1 else [()]
        q, planes = world.random_q(num_rows), world.values(private)
        step = world.backend.begin_step(private)[0]
        step.write_kv(0, *planes)
        want = step.attend(0, q, shape.head_dim**-0.5, sinks)
        after = memory.clone()
        for run in runs:
            batch = replace(private, shared=run)
            assert torch.equal(recorded.attend(batch, planes, q), want), (rows, lens, run)
            assert torch.equal(memory, after)


@needs_triton
@pytest.mark.parametrize("window_len", [None, 70])
def test_what_was_recorded_of_one_step_computes_others_to_the_bit(
    process: KernelProcess, window_len: int | None
) -> None:
    run_in(process, check_on_tape, replace(SHAPE, window_len=window_len), torch.tensor([-2.0, 0.5, 3.0, 30.0]))


@needs_triton
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(DType.BFLOAT16, DType.BFLOAT16), (DType.FLOAT32, DType.FP8_E4M3)])
def test_over_dtypes(process: KernelProcess, dtype: DType, kv_dtype: DType) -> None:
    run_in(process, check_on_tape, replace(SHAPE, kv_heads=1, dtype=dtype, kv_dtype=kv_dtype))


@needs_triton
def test_over_latents(process: KernelProcess) -> None:
    run_in(process, check_on_tape, Shape(16, 64, 1, 1, 4, 40, latent_dim=32, uses_triton=True))


def check_room(shape: Shape) -> None:
    lens = (40, 30, 600, 20)
    world = FixedWorld(shape, lens)
    kernels: Any = importlib.import_module("deltaserve.compute.attention.triton.triton_attention")
    backend: Any = world.backend
    with patch.object(kernels, "_LEAST_ROOM", 8):
        step = backend.fixed_step(world.decoding(lens, (0, 1)), 3)
        larger = backend.fixed_step(world.decoding(lens, (2, 1, 0)), 3)
    assert step.fill(world.decoding(lens, (1, 3, 0)))
    assert not step.fill(world.decoding(lens, (0, 1, 2)))  # 19 splits and more
    assert not step.fill(world.decoding(lens, (0, 1, 3, 2)))
    assert step.attention[0].work.positions.tolist() == [29, 19, 39], "a step that does not fit changes nothing"
    assert larger.attention[0].work.capacity == WorkCapacity(3, results=32, short=32, long=0, listed=8, pages=3 * 38)


@needs_triton
def test_a_step_that_needs_more_room_is_told(process: KernelProcess) -> None:
    run_in(process, check_room, replace(SHAPE, group_size=1, kv_heads=1))
