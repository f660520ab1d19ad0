"""Which KV is multiplied with which queries: the work list of one step as index arrays (numpy, host).

Short queries (decode, and up to 16 positions over a short context) are computed in *tiles* of 8 query rows, zero
padded, against one split of `split_tokens` keys. A split shared by several queries is one item with the rows of all of
them, a private split an item with the rows of one: the same tile shape either way, so a row's result has the same bits.
What follows the last whole split below q_start is the query's *tail*: causal and always private.
Tails of queries of about the same length go together, so that one extend of 16 positions does not give 16 rows to
every decoding row beside it.

A *unit* is one query row of every KV head: token * group_size + GQA head in the group, tokens counted over tiled
queries only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaserve.device.attention import Batch, Query, Shared
from deltaserve.device.page_table import Table
from deltaserve.device.scratch_limits import MAX_TILED_LEN, MAX_TILED_PARTS, TILE_ROWS

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SplitItems:
    """N whole splits, those with most tiles first."""

    pages: Ints  # [N, pages per split]
    splits: Ints  # [N] index of the split in its queries
    tiles: tuple[Ints, ...]  # j-th: [N_j, TILE_ROWS] units of the j-th tile of the first N_j items; `padding` fills up


@dataclass(frozen=True, slots=True)
class TailItems:
    """Tails of some tiled queries, the longest first."""

    pages: Ints  # [B, width / page_size]; beyond a tail's end its last page is repeated
    num_pages: Ints  # [B] of each
    parts: Ints  # [B] which partial result of its query rows a tail is: their last
    units: Ints  # [B, R]; `padding` fills up
    hidden: Bools  # [B, R, width]: key after the query's position
    stale: Bools  # [B, width]: key not written yet, may hold anything, NaN too


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Everything tiled queries read in one step."""

    queries: tuple[int, ...]
    """Indexes into the batch."""
    tokens: Ints  # [Tt] of the step's tokens, those of tiled queries
    padding: int
    """Unit id that stands for a zero row: the number of real units."""
    num_parts: Ints  # [Tt] partial results of a token's query rows: one for each whole split, one for the tail
    items: SplitItems | None
    tails: tuple[TailItems, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive knowledge about splits with the same rows."""

    line: int
    splits: Ints  # [n]
    units: Ints  # [depth, TILE_ROWS]


def is_tiled(query: Query, split_tokens: int) -> bool:
    """Others go alone, see long_query.py; the choice depends on the query alone, not on its batch."""
    num_parts = query.q_len * (query.q_start // split_tokens + 1)
    return query.q_len == 1 or (query.q_len <= MAX_TILED_LEN and num_parts <= MAX_TILED_PARTS)


def tiled_members(batch: Batch, run: Shared) -> tuple[int, ...]:
    """Queries of a run that read it together."""
    return tuple(index for index in run.queries if is_tiled(batch.queries[index], batch.split_tokens))


def plan_tiles(batch: Batch, table: Table, page_size: int, group_size: int) -> TilePlan | None:
    """None when no query is tiled."""
    queries = tuple(index for index, query in enumerate(batch.queries) if is_tiled(query, batch.split_tokens))
    if not queries:
        return None
    starts = np.cumsum([0, *(query.q_len for query in batch.queries)])
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in queries])
    lens = [batch.queries[index].q_len for index in queries]
    ends = np.cumsum(lens) * group_size
    units = {
        index: np.arange(end - length * group_size, end)
        for index, end, length in zip(queries, ends.tolist(), lens, strict=True)
    }
    padding = len(tokens) * group_size
    num_splits = [batch.queries[index].q_start // batch.split_tokens for index in queries]
    return TilePlan(
        queries=queries,
        tokens=tokens.astype(np.int64),
        padding=padding,
        num_parts=np.repeat(np.array(num_splits) + 1, lens),
        items=_split_items(_groups(batch, units, padding), table, batch.split_tokens // page_size),
        tails=tuple(
            _tail_items(batch, bucket, {index: units[index] for index in bucket}, padding, (table, page_size))
            for bucket in _by_length(batch, queries)
        ),
    )


def _by_length(batch: Batch, queries: Sequence[int]) -> list[tuple[int, ...]]:
    """Queries of 1, 2, 3 to 4, 5 to 8 and 9 to 16 positions, each with those of the longest tails first."""
    buckets: dict[int, list[int]] = {}
    for index in sorted(queries, key=lambda index: -_tail_len(batch.queries[index], batch.split_tokens)):
        buckets.setdefault((batch.queries[index].q_len - 1).bit_length(), []).append(index)
    return [tuple(buckets[size]) for size in sorted(buckets)]


def _tail_len(query: Query, split_tokens: int) -> int:
    return query.q_start % split_tokens + query.q_len


def _groups(batch: Batch, units: dict[int, Ints], padding: int) -> list[_Group]:
    split = batch.split_tokens
    private = {index: np.ones(batch.queries[index].q_start // split, np.bool_) for index in units}
    groups = []
    for run in batch.shared:
        members = tiled_members(batch, run)
        if len(members) < 2:
            continue
        rows = np.concatenate([units[index] for index in members])
        splits = np.arange(run.start // split, run.end // split)
        groups.append(_Group(batch.queries[members[0]].line, splits, _tiles(rows, padding)))
        for index in members:
            private[index][splits] = False
    for index, mask in private.items():
        splits = np.flatnonzero(mask)
        if len(splits):
            groups.append(_Group(batch.queries[index].line, splits, _tiles(units[index], padding)))
    return sorted(groups, key=lambda group: -len(group.units))


def _tiles(units: Ints, padding: int) -> Ints:
    """[n] -> [ceil(n / TILE_ROWS), TILE_ROWS]"""
    depth = -(-len(units) // TILE_ROWS)
    out = np.full(depth * TILE_ROWS, padding, np.int64)
    out[: len(units)] = units
    return out.reshape(depth, TILE_ROWS)


def _split_items(groups: Sequence[_Group], table: Table, pages_per_split: int) -> SplitItems | None:
    if not groups:
        return None
    offsets = np.arange(pages_per_split)
    pages = np.concatenate([table[g.line][g.splits[:, None] * pages_per_split + offsets] for g in groups])
    tiles = []
    for depth in range(len(groups[0].units)):
        deep = [group for group in groups if len(group.units) > depth]
        tiles.append(np.concatenate([np.tile(group.units[depth], (len(group.splits), 1)) for group in deep]))
    return SplitItems(pages.astype(np.int64), np.concatenate([group.splits for group in groups]), tuple(tiles))


def _tail_items(
    batch: Batch, indexes: tuple[int, ...], units: dict[int, Ints], padding: int, memory: tuple[Table, int]
) -> TailItems:
    """`memory`: page table and page size."""
    split, (table, page_size) = batch.split_tokens, memory
    queries = [batch.queries[index] for index in indexes]
    q_starts = np.array([query.q_start for query in queries])
    lines = np.array([query.line for query in queries])
    first = q_starts // split * split  # [B] position of the tail's first key
    lens = np.array([_tail_len(query, split) for query in queries])  # [B]
    num_pages = -(-lens // page_size)
    offsets = np.minimum(np.arange(num_pages[0]), num_pages[:, None] - 1)
    pages = table[lines[:, None], (first // page_size)[:, None] + offsets]
    max_rows = max(len(units[index]) for index in indexes)
    rows = np.full((len(indexes), max_rows), padding, np.int64)
    positions = np.zeros((len(indexes), max_rows), np.int64)  # of each query row, from its q_start
    for place, index in enumerate(indexes):
        count = len(units[index])
        rows[place, :count] = units[index]
        positions[place, :count] = np.arange(count) // (count // batch.queries[index].q_len)
    keys = np.arange(pages.shape[1] * page_size)  # [width]
    last_seen = (q_starts - first)[:, None] + positions  # [B, R]
    parts = q_starts // split
    hidden, stale = keys > last_seen[:, :, None], keys >= lens[:, None]
    return TailItems(pages.astype(np.int64), num_pages, parts, rows, hidden, stale)
