"""The work list of one step as requests of FlashInfer's prefill over pages (numpy, host). Does not import flashinfer.

FlashInfer's BatchPrefillWithPagedKVCacheWrapper computes requests: rows of queries over keys that begin at the begin of
a page, with one mask for all of them. An item of the work list (see plan.py, whose cuts these are) is such a
request: the rows of one query over a piece of keys that it reads alone, or of several over a split that they share.

    rows whose position lies in the piece    causal: the last of them sees the piece to its end
    rows behind it                           see all of it: no mask
    rows before it                           see nothing of it, and are in no request

So there are two wrappers, and each row has a partial result of every request that it is in. A decoding row sees its
last piece whole, so a step of decoding rows needs the first wrapper only. In a group with a window each query is one
causal request from the page on in which its window begins: a window is counted back from the last key of a request, so
it fits the piece that ends a query and none before it. Keys of that first page which lie before the window are read and
have no weight, so they must be numbers: pages are written from their begin on.

That items of shared prefixes can be requests of a prefill kernel whose results are merged is the idea of FlashInfer's
cascade inference; items that follow from each query alone are ours.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.attention.plan import Bools, Int32s, Int64s, TileSize, WorkTiles, plan_work
from deltaserve.compute.memory.page_table import Table
from deltaserve.core.errors import StateError

_WHOLE_ITEM = 1 << 30
"""Rows of a tile, or keys of a piece: more than there are."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedRequests:
    """What a wrapper plans with. Rows of all requests stand one after the other, and so do their pages."""

    qo_indptr: Int32s  # [N + 1] rows of a request
    kv_indptr: Int32s  # [N + 1] its pages in `kv_indices`
    kv_indices: Int32s  # [pages of all requests]
    last_page_lens: Int32s  # [N] keys in its last page, 1 to the page size

    @property
    def num_rows(self) -> int:
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferPlan:
    """One step of one page group. R partial results: of all rows of `whole`, then of all rows of `causal`."""

    whole: PagedRequests
    causal: PagedRequests
    tokens: Int32s  # [R] the step's token whose query a row is
    order: Int32s  # [R] partial results, token after token, each from root to leaf
    part_starts: Int32s  # [T + 1] a token's partial results in `order`


class _Rows(NamedTuple):
    """Query rows of items; arrays [M]."""

    items: Int64s
    tokens: Int64s
    places: Int64s
    """Partial results, numbered token after token, from root to leaf; with gaps for what a token does not see."""

    def where(self, chosen: Bools) -> "_Rows":
        return _Rows(self.items[chosen], self.tokens[chosen], self.places[chosen])


class _Items(NamedTuple):
    """Columns of WorkTiles' arrays [N] of which each tile is a whole item."""

    first_tokens: Int64s
    num_rows: Int64s
    starts: Int64s
    """First key: the begin of a page, at most a page before the lowest that a row sees."""
    ends: Int64s
    first_pages: Int64s
    """First page of the item's line, in `WorkTiles.pages`."""
    parts: Int64s


def plan_requests(batch: Batch, table: Table, page_size: int, window_len: int | None) -> FlashInferPlan:
    """`table` [lines, pages of a line]; `window_len`: tokens that a token sees, itself included; None: all before it.

    Raises StateError where splits do not begin at pages.
    """
    if window_len is not None:
        batch = replace(batch, split_tokens=_WHOLE_ITEM, shared=())
    elif batch.split_tokens % page_size:
        raise StateError(f"splits of {batch.split_tokens} tokens are no multiple of a page of {page_size}")
    size = TileSize(_WHOLE_ITEM, page_size)
    work = plan_work(batch, table, page_size, 1, window_len, (size, size))
    items = _items(work)
    rows, is_inside = _rows(work, items)
    is_causal = is_inside
    if window_len is None:  # a single row inside sees all
        is_causal = is_inside & (np.bincount(rows.items[is_inside], minlength=len(items.starts))[rows.items] > 1)
    whole, causal = rows.where(~is_causal), rows.where(is_causal)
    tokens, places = (np.concatenate(pair) for pair in ((whole.tokens, causal.tokens), (whole.places, causal.places)))
    return FlashInferPlan(
        whole=_requests(items, whole, work.pages, page_size),
        causal=_requests(items, causal, work.pages, page_size),
        tokens=tokens.astype(np.int32),
        order=np.argsort(places).astype(np.int32),
        part_starts=_starts(np.bincount(tokens, minlength=batch.num_tokens)),
    )


def _items(work: WorkTiles) -> _Items:
    columns = np.concatenate((work.short, work.long)).astype(np.int64).T
    first_tokens, _, num_rows, starts, _, ends, first_pages, parts = columns
    return _Items(first_tokens, num_rows, starts, ends, first_pages, parts)


def _rows(work: WorkTiles, items: _Items) -> tuple[_Rows, Bools]:
    """The rows that see something of their item, and whether they lie in it."""
    item = np.repeat(np.arange(len(items.num_rows)), items.num_rows)  # [M]
    first = items.first_tokens - np.cumsum(items.num_rows) + items.num_rows  # [N]
    token = work.tokens[first[item] + np.arange(len(item))].astype(np.int64)
    position = work.positions[token]
    sees = position >= items.starts[item]
    rows = _Rows(item, token, work.first_parts[token] + items.parts[item]).where(sees)
    return rows, (position < items.ends[item])[sees]


def _requests(items: _Items, rows: _Rows, pages: Int32s, page_size: int) -> PagedRequests:
    """Requests of the items that these rows belong to."""
    counts = np.bincount(rows.items, minlength=len(items.starts))
    kept = np.flatnonzero(counts)
    starts, lens = items.starts[kept], items.ends[kept] - items.starts[kept]
    num_pages = -(-lens // page_size)
    indptr = _starts(num_pages)
    first = items.first_pages[kept] + starts // page_size - indptr[:-1]
    return PagedRequests(
        qo_indptr=_starts(counts[kept]),
        kv_indptr=indptr,
        kv_indices=pages[np.repeat(first, num_pages) + np.arange(indptr[-1])],
        last_page_lens=((lens - 1) % page_size + 1).astype(np.int32),
    )


def _starts(counts: Int64s) -> Int32s:
    """Where each run of `counts` begins, and the end of the last one: [N + 1]."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
