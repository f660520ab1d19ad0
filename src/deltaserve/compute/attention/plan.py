"""The work list of one step as tiles of a fixed number of query rows, each over one piece of keys (numpy, host).

A query's keys are cut at absolute multiples of its *piece*: one split of `split_tokens`, or for queries of many
positions as many as keep the partial results few. Which piece that is, and in tiles of which shape its rows are
computed, follows from the query alone, never from its batch. Queries of a few positions that are cut at splits share
those that all of their positions see whole: one item with the rows of all readers.

Rows of an item are its tokens times the GQA heads of a KV head; a tile is some of them. All KV heads have the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.scratch_limits import MAX_PIECE_RESULTS, MAX_TILED_LEN
from deltaserve.compute.memory.page_table import Table

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_NO_TILES: Int32s = np.zeros((0, 8), np.int32)


class TileSize(NamedTuple):
    """Query rows, and keys that are multiplied at once."""

    rows: int
    keys: int


@dataclass(frozen=True, slots=True)
class WorkTiles:
    """Everything the kernels read of a step beside q, pages and sinks."""

    short: Int32s
    """[N, 8] of queries of at most MAX_TILED_LEN positions: index of the item's first token in `tokens`, first row and
    end of rows in the item, first key of the first block, lowest key, end of keys, index of the line's first page in
    `pages`, number of the partial result (see `first_parts`)."""
    long: Int32s
    """[N, 8] of the others."""
    tokens: Int32s  # [M] of the step, item after item
    positions: Int32s  # [T]
    first_parts: Int32s  # [T] index of the partial result that would be a token's number 0; may be negative
    part_starts: Int32s  # [T + 1] indexes of a token's partial results, root to leaf
    pages: Int32s  # [lines * pages of a line]
    write_pages: Int32s  # [T] page in which a token's keys and values are kept


class _Cut(NamedTuple):
    """How one query's keys are cut: into pieces [first, end) of `length` keys."""

    length: int
    first: int
    end: int

    @property
    def num_parts(self) -> int:
        return self.end - self.first


def is_short(query: Query) -> bool:
    return query.q_len <= MAX_TILED_LEN


def sharers(batch: Batch, run: Shared) -> tuple[int, ...]:
    """Queries of a run that read it together where their windows reach it."""
    return tuple(_first_whole(batch, run, None))


def shared_runs(batch: Batch, window_len: int | None) -> Iterator[Shared]:
    """What is read once for two queries or more: splits that all their positions see whole. Of a run these are several
    where windows begin one by one."""
    split = batch.split_tokens
    for run in batch.shared:
        wholes = _first_whole(batch, run, window_len)
        first_split, end_split = run.start // split, run.end // split
        firsts = sorted({min(end_split, max(first_split, whole)) for whole in set(wholes.values())})
        for first, end in pairwise([*firsts, end_split]):
            readers = tuple(index for index, whole in wholes.items() if whole <= first)
            if len(readers) > 1 and first < end:
                yield Shared(first * split, end * split, readers)


def _first_whole(batch: Batch, run: Shared, window_len: int | None) -> dict[int, int]:
    """The first split that every position of a query sees the begin of, for the queries whose pieces are splits."""
    split, found = batch.split_tokens, {}
    for index in run.queries:
        query = batch.queries[index]
        if query.q_len == 1 or (is_short(query) and _cut(query, split, window_len).length == split):
            found[index] = 0 if window_len is None else -(-max(0, query.q_end - window_len) // split)
    return found


def num_doublings(q_len: int, first: int, last: int) -> int:
    """How often a piece of a query of `q_len` positions is doubled, beginning with a split; `first`, `last`: the splits
    in which the keys that it sees begin and end."""
    count = 0
    while q_len > 1 and q_len * ((last >> count) - (first >> count) + 1) > MAX_PIECE_RESULTS:
        if first >> count == last >> count:
            break
        count += 1
    return count


def _cut(query: Query, split_tokens: int, window_len: int | None) -> _Cut:
    low = 0 if window_len is None else max(0, query.q_start - window_len + 1)
    first, last = low // split_tokens, (query.q_end - 1) // split_tokens
    count = num_doublings(query.q_len, first, last)
    return _Cut(split_tokens << count, first >> count, (last >> count) + 1)


def plan_work(
    batch: Batch,
    table: Table,
    page_size: int,
    group_size: int,
    window_len: int | None,
    sizes: tuple[TileSize, TileSize],
) -> WorkTiles:
    """`sizes`: of tiles of short queries, and of long ones."""
    queries = batch.queries
    lens = [query.q_len for query in queries]
    step = _Step(
        batch,
        group_size,
        window_len,
        cuts=[_cut(query, batch.split_tokens, window_len) for query in queries],
        starts=np.cumsum([0, *lens]),
        num_pages=-(-max((query.q_end for query in queries), default=0) // page_size),
    )
    private = [np.ones(cut.num_parts, np.bool_) for cut in step.cuts]
    tokens, tiles = _shared_tiles(step, sizes[0], private)
    short, long = [tiles], [_NO_TILES]
    decoding = np.array([index for index, query in enumerate(queries) if query.q_len == 1], np.int64)
    if len(decoding):
        short.append(_decoding_tiles(step, decoding, sizes[0], private))
    for index, query in enumerate(queries):
        if query.q_len > 1:
            of_size, size = (short, sizes[0]) if is_short(query) else (long, sizes[1])
            of_size.append(_private_tiles(step, index, size, np.flatnonzero(private[index])))
    part_starts = np.concatenate(([0], np.cumsum(np.repeat([cut.num_parts for cut in step.cuts], lens))))
    positions = batch.positions()
    lines = [query.line for query in queries]
    return WorkTiles(
        short=np.concatenate(short),
        long=np.concatenate(long),
        tokens=tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        first_parts=(part_starts[:-1] - np.repeat([cut.first for cut in step.cuts], lens)).astype(np.int32),
        part_starts=part_starts.astype(np.int32),
        pages=np.ascontiguousarray(table[lines, : step.num_pages]).reshape(-1),
        write_pages=table[np.repeat(lines, lens), positions // page_size],
    )


class _Step(NamedTuple):
    batch: Batch
    group_size: int
    window_len: int | None
    cuts: Sequence[_Cut]
    starts: Int64s  # [queries + 1] in the step's tokens
    num_pages: int
    """Pages per line of the table."""


class _Item(NamedTuple):
    """Rows that read the same keys: those of one query, or of several that share. Or [n, 1] such items, of which each
    has one of the pieces."""

    first_token: int | Int64s
    num_rows: int
    first_page: int | Int64s
    length: int
    """Keys in a piece."""


def _shared_tiles(step: _Step, size: TileSize, private: Sequence[Bools]) -> tuple[Int64s, Int32s]:
    """Tokens of the step and after them those of shared items; their tiles. What is shared is no longer `private`."""
    split = step.batch.split_tokens
    tokens, num_listed, tiles = [np.arange(step.starts[-1])], int(step.starts[-1]), [_NO_TILES]
    for run in shared_runs(step.batch, step.window_len):
        readers, pieces = run.queries, np.arange(run.start // split, run.end // split)[:, None]
        own = np.concatenate([np.arange(step.starts[index], step.starts[index + 1]) for index in readers])
        cut = run.start // split, run.end // split, split
        first_page = readers[0] * step.num_pages
        tiles.append(shared_item_tiles(num_listed, len(own) * step.group_size, first_page, cut, size))
        tokens.append(own)
        num_listed += len(own)
        for index in readers:
            private[index][pieces - step.cuts[index].first] = False
    return np.concatenate(tokens), np.concatenate(tiles)


def shared_item_tiles(
    first_token: int, num_rows: int, first_page: int, pieces: tuple[int, int, int], size: TileSize
) -> Int32s:
    """[N, 8] tiles of rows that read the splits [first, end) together; `pieces`: first, end, tokens of a split."""
    first, end, split = pieces
    numbers = np.arange(first, end)[:, None]
    return _tiles(
        _Item(first_token, num_rows, first_page, split), size, numbers, numbers * split, (numbers + 1) * split
    )


def _private_tiles(step: _Step, index: int, size: TileSize, places: Int64s) -> Int32s:
    """Tiles of one query over pieces it reads alone, by their places in its cut: no tile reads what none of its
    rows see."""
    query, cut, group_size = step.batch.queries[index], step.cuts[index], step.group_size
    item = _Item(int(step.starts[index]), query.q_len * group_size, index * step.num_pages, cut.length)
    rows = np.arange(0, item.num_rows, size.rows)
    pieces = (cut.first + places)[:, None]
    lows = pieces * cut.length
    if step.window_len is not None:
        lows = np.maximum(lows, query.q_start + rows // group_size - step.window_len + 1)
    last = query.q_start + (np.minimum(rows + size.rows, item.num_rows) - 1) // group_size
    return _tiles(item, size, pieces, lows, np.minimum((pieces + 1) * cut.length, last + 1))


def _decoding_tiles(step: _Step, indexes: Int64s, size: TileSize, private: Sequence[Bools]) -> Int32s:
    """Tiles as of `_private_tiles`, for all queries of one position at once: there are many, and each has few tiles."""
    split, cuts = step.batch.split_tokens, [step.cuts[index] for index in indexes]
    is_private = np.concatenate([private[index] for index in indexes])
    counts = np.array([cut.num_parts for cut in cuts])
    firsts = np.array([cut.first for cut in cuts])
    pieces = np.repeat(firsts + counts - counts.cumsum(), counts) + np.arange(counts.sum())
    pieces, of = pieces[is_private, None], np.repeat(indexes, counts)[is_private, None]
    ends = np.array([query.q_end for query in step.batch.queries])[of]
    lows = pieces * split if step.window_len is None else np.maximum(pieces * split, ends - step.window_len)
    item = _Item(step.starts[of], step.group_size, of * step.num_pages, split)
    return _tiles(item, size, pieces, lows, np.minimum((pieces + 1) * split, ends))


def _tiles(item: _Item, size: TileSize, pieces: Int64s, lows: Int64s, ends: Int64s) -> Int32s:
    """[pieces * tiles, 8]: those of one piece stand together, as they read the same keys. `pieces` [n, 1]; `lows`,
    `ends`: that, or [n, tiles]."""
    rows = np.arange(0, item.num_rows, size.rows)
    starts = pieces * item.length
    blocks = starts + np.maximum(lows - starts, 0) // size.keys * size.keys
    fields = (item.first_token, rows, item.num_rows, blocks, lows, ends, item.first_page, pieces)
    tiles = np.empty((*np.broadcast_shapes(*map(np.shape, fields)), 8), np.int32)
    for column, values in enumerate(fields):
        tiles[..., column] = values
    return tiles.reshape(-1, 8)
