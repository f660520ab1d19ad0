"""Which KV is multiplied with which queries: the work list of one step as index arrays (numpy, host).

Short queries (decode, and up to 16 positions over a short context) are computed in *tiles* of 8 query rows, zero
padded, against one split of `split_tokens` keys. A split shared by several queries is one item with the rows of all of
them, a private split an item with the rows of one: the same tile shape either way, so a row's result has the same bits.
What lies before and after the whole splits that a query sees (query_cut.py) is always private. Such edges are as wide,
and have as many rows, as the next power of two of their own pages and positions: those of one shape go together, and a
row's bits do not depend on which others there are.

A *unit* is one query row of every KV head: token * group_size + GQA head in the group, tokens counted over tiled
queries only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.query_cut import EdgeKeys, QueryCut, cut_query
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN, MAX_TILED_PARTS, TILE_ROWS
from deltaserve.compute.memory.page_table import Table

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SplitItems:
    """N whole splits, those with most tiles first."""

    pages: Ints  # [N, pages per split]
    splits: Ints  # [N] index of the split in its queries
    tiles: tuple[Ints, ...]  # j-th: [N_j, TILE_ROWS] units of the j-th tile of the first N_j items; `padding` fills up


@dataclass(frozen=True, slots=True)
class EdgeItems:
    """Heads and tails of some tiled queries."""

    pages: Ints  # [B, width / page_size]; beyond an item's end its last page is repeated
    parts: Ints  # [B] which partial result of its query rows an item is
    units: Ints  # [B, R]; `padding` fills up
    hidden: Bools  # [B, R, width]: key that the query's position does not see
    stale: Bools  # [B, width]: key of another item, not written yet, or of nobody: may hold anything, NaN too


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Everything tiled queries read in one step."""

    queries: tuple[int, ...]
    """Tiled queries: indexes into the batch."""
    tokens: Ints  # [Tt] of the step's tokens, those of tiled queries
    padding: int
    """Unit id that stands for a zero row: the number of real units."""
    num_parts: Ints  # [Tt] partial results of a token's query rows: one for each whole split and each edge
    first_parts: Ints  # [Tt] number of the first of them
    items: SplitItems | None
    edges: tuple[EdgeItems, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive knowledge about splits with the same rows."""

    line: int
    splits: Ints  # [n]
    units: Ints  # [depth, TILE_ROWS]


class _Edge(NamedTuple):
    """Keys that one query reads alone, and its rows."""

    query: Query
    units: Ints  # [q_len * group_size]
    keys: EdgeKeys
    num_pages: int


class _Shape(NamedTuple):
    """Exponents of two: of edges that are computed together."""

    positions: int
    pages: int


def is_tiled(query: Query, split_tokens: int, window_len: int | None = None) -> bool:
    """Others go alone, see long_query.py; the choice depends on the query alone, not on its batch."""
    return query.q_len == 1 or _tiled_cut(query, split_tokens, window_len) is not None


def _tiled_cut(query: Query, split_tokens: int, window_len: int | None) -> QueryCut | None:
    """How a query is cut; None if it is not tiled."""
    if query.q_len > MAX_TILED_LEN:
        return None
    cut = cut_query(query, split_tokens, window_len)
    return cut if query.q_len == 1 or query.q_len * cut.num_parts <= MAX_TILED_PARTS else None


def tiled_members(batch: Batch, run: Shared, window_len: int | None = None) -> tuple[int, ...]:
    """Queries of a run that read it together, as far as their windows reach."""
    return tuple(index for index in run.queries if is_tiled(batch.queries[index], batch.split_tokens, window_len))


def plan_tiles(
    batch: Batch, table: Table, page_size: int, group_size: int, window_len: int | None = None
) -> TilePlan | None:
    """The tiles of a step; None when no query is tiled."""
    split = batch.split_tokens
    tried = enumerate(_tiled_cut(query, split, window_len) for query in batch.queries)
    cuts = {index: cut for index, cut in tried if cut is not None}
    if not cuts:
        return None
    queries = tuple(cuts)
    starts = np.cumsum([0, *(query.q_len for query in batch.queries)])
    tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in queries])
    lens = [batch.queries[index].q_len for index in queries]
    ends = np.cumsum(lens) * group_size
    units = {
        index: np.arange(end - length * group_size, end)
        for index, end, length in zip(queries, ends.tolist(), lens, strict=True)
    }
    padding = len(tokens) * group_size
    return TilePlan(
        queries=queries,
        tokens=tokens.astype(np.int64),
        padding=padding,
        num_parts=np.repeat([cuts[index].num_parts for index in queries], lens),
        first_parts=np.repeat([cuts[index].first_part for index in queries], lens),
        items=_split_items(_groups(batch, cuts, units, padding), table, split // page_size),
        edges=tuple(
            _edge_items(edges, shape, group_size, padding, table, page_size, window_len)
            for shape, edges in _by_shape(batch, cuts, units, page_size)
        ),
    )


def _by_shape(
    batch: Batch, cuts: Mapping[int, QueryCut], units: Mapping[int, Ints], page_size: int
) -> list[tuple[_Shape, list[_Edge]]]:
    """Edges of queries of 1, 2, 3 to 4, 5 to 8 and 9 to 16 positions, on 1, 2, 3 to 4, ... pages."""
    buckets: dict[_Shape, list[_Edge]] = {}
    for index, cut in cuts.items():
        query = batch.queries[index]
        for keys in cut.edges:
            num_pages = -(-keys.end // page_size) - keys.start // page_size
            shape = _Shape((query.q_len - 1).bit_length(), (num_pages - 1).bit_length())
            buckets.setdefault(shape, []).append(_Edge(query, units[index], keys, num_pages))
    return sorted(buckets.items())


def _groups(batch: Batch, cuts: Mapping[int, QueryCut], units: Mapping[int, Ints], padding: int) -> list[_Group]:
    private = {index: np.ones(len(cut.splits), np.bool_) for index, cut in cuts.items()}
    groups = []
    for run in batch.shared:
        for readers, splits in _readers(run, cuts, batch.split_tokens):
            rows = np.concatenate([units[index] for index in readers])
            groups.append(_Group(batch.queries[readers[0]].line, np.array(splits), _tiles(rows, padding)))
            for index in readers:
                first = cuts[index].splits.start
                private[index][splits.start - first : splits.stop - first] = False
    for index, mask in private.items():
        alone = cuts[index].splits.start + np.flatnonzero(mask)
        if len(alone):
            groups.append(_Group(batch.queries[index].line, alone, _tiles(units[index], padding)))
    return sorted(groups, key=lambda group: -len(group.units))


def _readers(run: Shared, cuts: Mapping[int, QueryCut], split_tokens: int) -> Iterator[tuple[tuple[int, ...], range]]:
    """Two tiled queries or more, and the splits that are whole for these and no others: windows begin one by one."""
    members = [index for index in run.queries if index in cuts]
    first_split, end_split = run.start // split_tokens, run.end // split_tokens
    firsts = sorted({max(first_split, cuts[index].splits.start) for index in members})
    for first, end in pairwise([*firsts, end_split]):
        readers = tuple(index for index in members if cuts[index].splits.start <= first)
        if len(readers) > 1 and first < end_split:
            yield readers, range(first, min(end, end_split))


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


def _edge_items(
    edges: Sequence[_Edge],
    shape: _Shape,
    group_size: int,
    padding: int,
    table: Table,
    page_size: int,
    window_len: int | None,
) -> EdgeItems:
    lines, q_starts, starts, ends, parts, num_pages = np.array(
        [(e.query.line, e.query.q_start, *e.keys, e.num_pages) for e in edges]
    ).T  # [B] each
    first_pages = starts // page_size
    offsets = np.minimum(np.arange(1 << shape.pages), num_pages[:, None] - 1)
    pages = table[lines[:, None], first_pages[:, None] + offsets]
    max_rows = group_size << shape.positions
    rows = np.full((len(edges), max_rows), padding, np.int64)
    positions = np.repeat(q_starts[:, None], max_rows, 1)  # [B, R] of each query row
    for place, edge in enumerate(edges):
        count = len(edge.units)
        rows[place, :count] = edge.units
        if edge.query.q_len > 1:
            positions[place, :count] += np.arange(count) // (count // edge.query.q_len)
    keys = (first_pages * page_size)[:, None] + np.arange(pages.shape[1] * page_size)  # [B, width] positions
    stale = keys >= ends[:, None]
    hidden = keys[:, None] > positions[:, :, None]
    if window_len is not None:  # without one a tail begins at a page, and ends behind its last position
        stale |= keys < starts[:, None]
        hidden |= keys[:, None] <= positions[:, :, None] - window_len
        hidden |= stale[:, None]
    return EdgeItems(pages.astype(np.int64), parts, rows, hidden, stale)
