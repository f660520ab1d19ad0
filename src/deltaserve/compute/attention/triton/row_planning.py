"""The work list of decoding rows made by the device: one launch per page group and step, in place of numpy on the host.

It is the list of plan.py: rows cut at absolute multiples of a split, and of each row those tiles that no shared run
covers. Needs triton when it is imported.
"""

import triton
import triton.language as tl


@triton.jit
def plan_rows(
    lines,  # [B] int64, see RowsOnDevice
    num_rows,  # [1] int32
    positions,  # [lines] int64
    table,  # [lines, line_pages] int32
    private_from,  # [B] int32: the first split that a row reads alone; those before it are read in shared tiles
    num_shared,  # [1] int32: tiles of shared runs, which stand first in `tiles`
    row_positions,  # [B] int32, out
    write_pages,  # [B] int32, out
    first_parts,  # [B] int32, out
    part_starts,  # [B + 1] int32, out
    num_tiles,  # [1] int32, out
    tiles,  # [N, 8] int32, out
    line_pages,
    BLOCK: tl.constexpr,  # B or more, a power of two
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: sees everything
    GROUP_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE_TILES: tl.constexpr,  # tiles of a row over one piece
    WRITTEN: tl.constexpr,  # tiles that a program writes at once
):
    """Grid [B]: each program counts what the rows before its own have, and writes what is its row's."""
    slot, own, count = tl.arange(0, BLOCK), tl.program_id(0), tl.load(num_rows)
    is_row = slot < count
    line = tl.load(lines + slot, mask=is_row, other=0)
    ends = tl.load(positions + line, mask=is_row, other=-1).to(tl.int32) + 1
    firsts = tl.maximum(ends - WINDOW, 0) // SPLIT if WINDOW > 0 else tl.zeros([BLOCK], tl.int32)
    num_pieces = (ends + SPLIT - 1) // SPLIT
    alone = tl.maximum(firsts, tl.load(private_from + slot, mask=is_row, other=0))
    parts = tl.where(is_row, num_pieces - firsts, 0)
    own_tiles = tl.where(is_row, (num_pieces - alone) * PIECE_TILES, 0)
    is_before, is_own = slot < own, slot == own
    part, first_tile = tl.sum(tl.where(is_before, parts, 0), 0), tl.sum(tl.where(is_before, own_tiles, 0), 0)
    first_tile += tl.load(num_shared)
    num_parts, num_own = tl.sum(tl.where(is_own, parts, 0), 0), tl.sum(tl.where(is_own, own_tiles, 0), 0)
    end, first = tl.sum(tl.where(is_own, ends, 0), 0), tl.sum(tl.where(is_own, firsts, 0), 0)
    first_alone = tl.sum(tl.where(is_own & is_row, alone, 0), 0)
    own_line = tl.load(lines + own)

    if own == 0:
        tl.store(part_starts, 0)
    if own == tl.num_programs(0) - 1:
        tl.store(num_tiles, first_tile + num_own)
    tl.store(part_starts + own + 1, part + num_parts)
    tl.store(first_parts + own, part - first)
    tl.store(row_positions + own, end - 1)
    has_page = own < count
    page = tl.load(table + own_line * line_pages + tl.maximum(end - 1, 0) // PAGE_SIZE, mask=has_page, other=0)
    tl.store(write_pages + own, page)

    low = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    for begin in range(0, num_own, WRITTEN):
        index = begin + tl.arange(0, WRITTEN)
        is_tile = index < num_own
        piece = first_alone + index // PIECE_TILES
        start = piece * SPLIT
        lowest = tl.maximum(start, low)
        tile = tiles + (first_tile + index) * 8
        tl.store(tile, tl.zeros([WRITTEN], tl.int32) + own, mask=is_tile)
        tl.store(tile + 1, index % PIECE_TILES * TILE_ROWS, mask=is_tile)
        tl.store(tile + 2, tl.zeros([WRITTEN], tl.int32) + GROUP_SIZE, mask=is_tile)
        tl.store(tile + 3, start + (lowest - start) // KEYS * KEYS, mask=is_tile)
        tl.store(tile + 4, lowest, mask=is_tile)
        tl.store(tile + 5, tl.minimum(start + SPLIT, end), mask=is_tile)
        tl.store(tile + 6, tl.zeros([WRITTEN], tl.int32) + (own_line * line_pages).to(tl.int32), mask=is_tile)
        tl.store(tile + 7, piece, mask=is_tile)
