"""The work list of decoding rows made by the device: one launch per page group and step, in place of numpy on the host.

It is the list of plan.py: rows of one position, or of a few, are cut at absolute multiples of their pieces, and of each
row it has those tiles that no shared run covers. Needs triton when it is imported.
"""

import triton
import triton.language as tl


@triton.jit
def plan_rows(
    lines,  # [B] int64, see RowsOnDevice
    num_rows,  # [1] int32
    positions,  # [lines] int64
    lens,  # [B] int64
    table,  # [lines, line_pages] int32
    private_from,  # [B] int32: the first split that a row reads alone; those before it are read in shared tiles
    num_shared,  # [1] int32: tiles of shared runs, which stand first in `tiles`
    token_positions,  # [B] int32, out
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
    MOST_LEN: tl.constexpr,  # of `lens`, a power of two
    MOST_RESULTS: tl.constexpr,  # of a row of several positions, see plan.num_doublings
    DOUBLINGS: tl.constexpr,  # of a piece, at most
    WRITTEN: tl.constexpr,  # tiles that a program writes at once
):
    """Grid [B]: each program counts what the rows before its own have, and writes what is its row's, and that the token
    of its number has no part, where the step has fewer tokens."""
    slot, own, count = tl.arange(0, BLOCK), tl.program_id(0), tl.load(num_rows)
    is_row = slot < count
    line = tl.load(lines + slot, mask=is_row, other=0)
    row_lens = tl.load(lens + slot, mask=is_row, other=0).to(tl.int32)
    starts = tl.load(positions + line, mask=is_row, other=0).to(tl.int32)
    firsts = tl.maximum(starts + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else tl.zeros([BLOCK], tl.int32)
    lasts = tl.maximum(starts + row_lens - 1, 0) // SPLIT
    doubled = tl.zeros([BLOCK], tl.int32)
    for _ in range(DOUBLINGS):
        pieces = (lasts >> doubled) - (firsts >> doubled) + 1
        doubled += ((row_lens > 1) & (pieces > 1) & (row_lens * pieces > MOST_RESULTS)).to(tl.int32)
    firsts, num_pieces = firsts >> doubled, (lasts >> doubled) + 1
    alone = tl.maximum(firsts, tl.load(private_from + slot, mask=is_row, other=0))
    parts = tl.where(is_row, num_pieces - firsts, 0)  # of each token of the row
    piece_tiles = (row_lens * GROUP_SIZE + TILE_ROWS - 1) // TILE_ROWS
    own_tiles = tl.where(is_row, (num_pieces - alone) * piece_tiles, 0)
    is_before, is_own = slot < own, slot == own
    token, part = tl.sum(tl.where(is_before, row_lens, 0), 0), tl.sum(tl.where(is_before, parts * row_lens, 0), 0)
    first_tile = tl.load(num_shared) + tl.sum(tl.where(is_before, own_tiles, 0), 0)
    num_parts, num_own = tl.sum(tl.where(is_own, parts, 0), 0), tl.sum(tl.where(is_own, own_tiles, 0), 0)
    begin_at, length = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, row_lens, 0), 0)
    first, first_alone = tl.sum(tl.where(is_own, firsts, 0), 0), tl.sum(tl.where(is_own & is_row, alone, 0), 0)
    piece_len = SPLIT << tl.sum(tl.where(is_own, doubled, 0), 0)
    num_piece_tiles = tl.maximum(tl.sum(tl.where(is_own, piece_tiles, 0), 0), 1)
    own_line = tl.load(lines + own)

    if own == 0:
        tl.store(part_starts, 0)
    if own == tl.num_programs(0) - 1:
        tl.store(num_tiles, first_tile + num_own)
    if own >= tl.sum(row_lens, 0):
        tl.store(part_starts + own + 1, tl.sum(parts * row_lens, 0))
    place = tl.arange(0, MOST_LEN)
    is_token = place < length
    tl.store(part_starts + token + place + 1, part + (place + 1) * num_parts, mask=is_token)
    tl.store(first_parts + token + place, part + place * num_parts - first, mask=is_token)
    tl.store(token_positions + token + place, begin_at + place, mask=is_token)
    page = tl.load(table + own_line * line_pages + (begin_at + place) // PAGE_SIZE, mask=is_token, other=0)
    tl.store(write_pages + token + place, page, mask=is_token)

    for begin in range(0, num_own, WRITTEN):
        index = begin + tl.arange(0, WRITTEN)
        is_tile = index < num_own
        piece, row = first_alone + index // num_piece_tiles, index % num_piece_tiles * TILE_ROWS
        start = piece * piece_len
        lowest = start
        if WINDOW > 0:
            lowest = tl.maximum(start, begin_at + row // GROUP_SIZE + 1 - WINDOW)
        last = begin_at + (tl.minimum(row + TILE_ROWS, length * GROUP_SIZE) - 1) // GROUP_SIZE
        tile = tiles + (first_tile + index) * 8
        tl.store(tile, tl.zeros([WRITTEN], tl.int32) + token, mask=is_tile)
        tl.store(tile + 1, row, mask=is_tile)
        tl.store(tile + 2, tl.zeros([WRITTEN], tl.int32) + length * GROUP_SIZE, mask=is_tile)
        tl.store(tile + 3, start + (lowest - start) // KEYS * KEYS, mask=is_tile)
        tl.store(tile + 4, lowest, mask=is_tile)
        tl.store(tile + 5, tl.minimum(start + piece_len, last + 1), mask=is_tile)
        tl.store(tile + 6, tl.zeros([WRITTEN], tl.int32) + (own_line * line_pages).to(tl.int32), mask=is_tile)
        tl.store(tile + 7, piece, mask=is_tile)
