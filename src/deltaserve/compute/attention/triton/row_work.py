"""The work list of a fixed step in the device's memory: the device makes it of its rows (row_planning.py), the host
tells it what is shared, when that changes. Needs triton when it is imported."""

from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from deltaserve.compute.attention.fixed_step import RowsOnDevice, RowsToCome
from deltaserve.compute.attention.plan import Int32s, Int64s, TileSize, num_doublings, shared_item_tiles
from deltaserve.compute.attention.scratch_limits import MAX_PIECE_RESULTS
from deltaserve.compute.attention.triton.row_planning import plan_rows
from deltaserve.compute.attention.triton.work_buffer import WorkCapacity, fields_of
from deltaserve.compute.memory.host_arrays import write_over

_TILES_AT_ONCE = 32


class RowCut(NamedTuple):
    """How the rows of a page group are cut into tiles."""

    split_tokens: int
    window_len: int | None
    page_size: int
    group_size: int
    """Query heads to a KV head."""
    size: TileSize

    def pieces(self, ends: Int64s, lens: Int64s) -> tuple[Int64s, Int64s]:
        """Pieces of the keys of rows with so many keys and positions [n], and how often each doubles a split [n]."""
        last = (ends - 1) // self.split_tokens
        first = np.zeros_like(last)
        if self.window_len is not None:
            first = np.maximum(ends - lens + 1 - self.window_len, 0) // self.split_tokens
        if not (lens > 1).any():
            return last - first + 1, np.zeros_like(last)
        bounds = zip(lens.tolist(), first.tolist(), last.tolist(), strict=True)
        doubled = np.array([num_doublings(*of_row) for of_row in bounds], np.int64)
        return (last >> doubled) - (first >> doubled) + 1, doubled

    def need(self, ends: Int64s, lens: Int64s) -> tuple[int, int]:
        """Partial results and tiles of such rows."""
        pieces, _ = self.pieces(ends, lens)
        tiles = -(-lens * self.group_size // self.size.rows)  # of a row over one piece
        return int((pieces * lens).sum()), int((pieces * tiles).sum())


class SharedWork(NamedTuple):
    """What rows read together."""

    private_from: Int32s  # [n] the first split that each row reads alone
    tokens: Int32s  # [M] tokens of the shared items, one after the other
    tiles: Int32s  # [N, 8]
    num_tokens: int
    """Positions that are not read again because of sharing."""


def shared_work(cut: RowCut, room: int, rows: RowsToCome, line_pages: int) -> SharedWork:
    """The shared items of a step with room for so many tokens; `line_pages`: of the page table.

    Of a window nothing is shared: which splits its rows see whole changes with every step, and it is short. Nor by
    rows whose pieces are longer than a split.

    A row shares from the root on without gaps: it leaves a run whose begin it does not reach.
    """
    private_from, split = np.zeros(len(rows.lines), np.int32), cut.split_tokens
    token_ends, (_, doubled) = rows.lens.cumsum(), cut.pieces(rows.ends, rows.lens)
    tokens: list[Int64s] = []
    tiles: list[Int32s] = [np.zeros((0, 8), np.int32)]
    num_saved, num_listed = 0, room
    for run in sorted(rows.shared, key=lambda run: run.start) if cut.window_len is None else ():
        first, end = run.start // split, run.end // split
        whole = [index for index in run.queries if private_from[index] == first and not doubled[index]]
        readers = np.array(whole, np.int64)
        if len(readers) < 2 or first == end:
            continue
        own = [np.arange(token_ends[index] - rows.lens[index], token_ends[index]) for index in whole]
        num_own, first_page = sum(map(len, own)), int(rows.lines[readers[0]]) * line_pages
        tiles.append(shared_item_tiles(num_listed, num_own * cut.group_size, first_page, (first, end, split), cut.size))
        tokens += own
        num_listed += num_own
        num_saved += (len(readers) - 1) * (run.end - run.start)
        private_from[readers] = end
    listed = np.concatenate(tokens).astype(np.int32) if tokens else np.zeros(0, np.int32)
    return SharedWork(private_from, listed, np.concatenate(tiles), num_saved)


class RowWork:
    """Has the fields of WorkBuffer, whose meaning is that of `WorkTiles`; `pages` is the table of all lines."""

    def __init__(self, on_device: RowsOnDevice, table: Tensor, cut: RowCut, capacity: WorkCapacity) -> None:
        """`table`: of the page group's pool; `capacity.tokens`: of `on_device`."""
        num_rows, device = capacity.tokens, table.device
        self.capacity = capacity
        self._rows, self._table, self._cut = on_device, table, cut
        sizes = (1, num_rows, num_rows, num_rows + 1, num_rows, 1, num_rows, capacity.listed, 8 * capacity.short)
        places = fields_of(sizes)
        start, size = places[-1]
        memory = torch.zeros(start + size, dtype=torch.int32, device=device)
        fields = [memory[start : start + size] for start, size in places]
        self.num_short, self.positions, self.first_parts, self.part_starts, self.write_pages, *fields = fields
        self._num_shared, self._private_from, self.tokens, self.short = fields
        self._first_of_host = places[5][0]
        self._places = [start - self._first_of_host for start, _ in places[5:]]
        self._of_host = memory[self._first_of_host :]
        self.num_tokens = on_device.num_tokens
        self.num_long = torch.zeros(1, dtype=torch.int32, device=device)
        self.long = memory[:0]
        self.pages = table.view(-1)

    def holds(self, ends: Int64s, lens: Int64s) -> bool:
        results, tiles = self._cut.need(ends, lens)
        return results <= self.capacity.results and tiles <= self.capacity.short

    def has_room(self, shared: SharedWork) -> bool:
        return self.capacity.tokens + len(shared.tokens) <= self.capacity.listed

    def share(self, shared: SharedWork) -> None:
        """For what the device is given from now on."""
        count, private, listed, tiles = self._places
        packed = np.zeros(tiles + shared.tiles.size, np.int32)
        packed[count] = len(shared.tiles)
        packed[private : private + len(shared.private_from)] = shared.private_from
        num_rows = self.capacity.tokens
        packed[listed : listed + num_rows] = np.arange(num_rows)
        packed[listed + num_rows : listed + num_rows + len(shared.tokens)] = shared.tokens
        packed[tiles:] = shared.tiles.reshape(-1)
        write_over(self._of_host[: len(packed)], packed)

    def plan(self) -> None:
        """Launch what makes the list."""
        rows, cut, num_rows = self._rows, self._cut, self.capacity.tokens
        most_splits = self._table.shape[1] * cut.page_size // cut.split_tokens + 1
        with torch.cuda.device_of(self.short):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            plan_rows[num_rows,](
                rows.lines,
                rows.num_rows,
                rows.positions,
                rows.lens,
                self._table,
                self._private_from,
                self._num_shared,
                self.positions,
                self.write_pages,
                self.first_parts,
                self.part_starts,
                self.num_short,
                self.short,
                self._table.shape[1],
                BLOCK=triton.next_power_of_2(num_rows),
                PAGE_SIZE=cut.page_size,
                SPLIT=cut.split_tokens,
                WINDOW=cut.window_len or 0,
                GROUP_SIZE=cut.group_size,
                TILE_ROWS=cut.size.rows,
                KEYS=cut.size.keys,
                MOST_LEN=rows.most_len,
                MOST_RESULTS=MAX_PIECE_RESULTS,
                DOUBLINGS=most_splits.bit_length() if rows.most_len > 1 else 0,
                WRITTEN=_TILES_AT_ONCE,
            )
