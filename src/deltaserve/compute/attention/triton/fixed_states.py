"""Recurrent states of fixed steps: which slots its rows read and write the device finds in its own page tables.

A row's slots follow from its position, as in step_states.py: it goes on from the slot of the position before and
leaves its state in that of its own, which is another one where a page begins. Needs triton when it is imported.
"""

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Query
from deltaserve.compute.attention.fixed_step import RowsOnDevice
from deltaserve.compute.attention.triton.state_kernels import load_states, store_states
from deltaserve.compute.attention.triton_launch import KernelLauncher, power_of_two
from deltaserve.compute.memory.state_arena import StateArena

_PROGRAM_STATES = 1024
"""Elements that one program moves."""
_NO_SLOT = -1


class StateMoves:
    """Copies of states, by kernels that know rows without a slot: see StateArena.load and store, which have none."""

    def __init__(self) -> None:
        self._load, self._store = KernelLauncher(load_states), KernelLauncher(store_states)

    def loaded(self, block: Tensor, slots: Tensor) -> Tensor:
        """`block` [slots, heads, rows, width] of an arena, `slots` [B] int64 -> [B, heads, rows, width]"""
        out = torch.empty((len(slots), *block.shape[1:]), dtype=block.dtype, device=block.device)
        grid, constants = _launch(block, len(slots))
        self._load(grid, (slots, block, out), (), constants)
        return out

    def store(self, block: Tensor, slots: Tensor, values: Tensor) -> None:
        """`values` [B, heads, rows, width] in any float type, to `slots` [B] int64 of `block`."""
        grid, constants = _launch(block, len(slots))
        self._store(grid, (slots, values.to(block.dtype).contiguous(), block), (), constants)


def _launch(block: Tensor, num_rows: int) -> tuple[tuple[int, int], tuple[object, ...]]:
    """Grid and constants."""
    num_heads, length = block.shape[1], block.shape[2] * block.shape[3]
    width = min(_PROGRAM_STATES, power_of_two(length))
    num_blocks = -(-length // width)
    constants = block.stride(0), block.stride(1), num_heads, length, num_blocks, width
    return (num_rows, num_heads * num_blocks), constants


class FixedStates:
    """StepStates of a fixed step in one arena: one token of each row, as many as there is room for.

    Rows that a step does not have read zeros and store nothing.
    """

    def __init__(
        self, arena: StateArena, on_device: RowsOnDevice, table: Tensor, page_size: int, moves: StateMoves
    ) -> None:
        """`table`: of the arena's pool, [lines, pages] int32 on the device."""
        self._arena, self._rows, self._table = arena, on_device, table
        self._page_size, self._moves = page_size, moves
        self._order = torch.arange(len(on_device.lines), device=table.device)
        self._sources = self._targets = torch.full_like(self._order, _NO_SLOT)

    @property
    def queries(self) -> tuple[Query, ...]:
        """No query: where its rows stand the device knows alone."""
        return ()

    @property
    def undecided(self) -> tuple[int, ...]:
        return ()

    @property
    def single_tokens(self) -> int | None:
        return len(self._order)

    def plan(self) -> None:
        """Have the device find the slots of the rows as they stand then."""
        rows = self._rows
        positions = rows.positions.index_select(0, rows.lines)
        self._sources = self._slots((positions - 1).clamp_(min=0), (self._order < rows.num_rows) & (positions > 0))
        self._targets = self._slots(positions, self._order < rows.num_stored)

    def _slots(self, positions: Tensor, has_slot: Tensor) -> Tensor:
        """[B] int64: slots of these positions [B], where there are any."""
        pages = (positions // self._page_size).masked_fill_(~has_slot, 0)  # of nobody's line it may be any number
        places = self._rows.lines * self._table.shape[1] + pages
        found = self._table.view(-1).index_select(0, places).to(torch.int64)
        return found.masked_fill_(~has_slot, _NO_SLOT)

    def load(self, layer: int, some: Tensor | None = None) -> tuple[Tensor, ...]:
        slots = self._sources if some is None else self._sources[some]
        return tuple(self._moves.loaded(block, slots) for block in self._arena.layer_blocks(layer))

    def store(self, layer: int, *values: Tensor, some: Tensor | None = None) -> None:
        slots = self._targets if some is None else self._targets[some]
        for block, of_block in zip(self._arena.layer_blocks(layer), values, strict=True):
            self._moves.store(block, slots, of_block)
