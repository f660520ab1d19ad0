"""Requests of FlashInfer's wrappers: every row meets every key it sees once, in the pages of its line."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.flashinfer.flashinfer_plan import FlashInferPlan, PagedRequests, plan_requests
from deltaserve.compute.memory.page_table import Table
from deltaserve.core.errors import StateError

NUM_LINES, MAX_LEN = 6, 400


class Met:
    """What the partial results of each token hold, and how often a key was read."""

    def __init__(self, batch: Batch, plan: FlashInferPlan, page_size: int, window_len: int | None) -> None:
        self._batch, self._page_size = batch, page_size
        self.keys: list[list[int]] = []
        """[R] rows |-> the places (page * page size + offset) that a row sees, in order."""
        self.num_read = 0
        self._read(plan.whole, None, None)
        self._read(plan.causal, 0, window_len)

    def _read(self, requests: PagedRequests, diagonal: int | None, window_len: int | None) -> None:
        assert len(requests.qo_indptr) == len(requests.kv_indptr) == len(requests.last_page_lens) + 1
        bounds = zip(pairwise(requests.qo_indptr.tolist()), pairwise(requests.kv_indptr.tolist()), strict=True)
        for ((row, row_end), (page, page_end)), last in zip(bounds, requests.last_page_lens.tolist(), strict=True):
            num_rows, pages = row_end - row, requests.kv_indices[page:page_end].tolist()
            assert num_rows > 0 and pages, "an empty request"
            assert 1 <= last <= self._page_size
            places = [at * self._page_size + offset for at in pages for offset in range(self._page_size)]
            places = places[: len(places) - self._page_size + last]
            self.num_read += len(places)
            for index in range(num_rows):
                end = len(places) if diagonal is None else len(places) - num_rows + index + 1
                assert end > 0
                self.keys.append(places[0 if window_len is None else max(0, end - window_len) : end])


def table_of(draw: random.Random, page_size: int, common_len: int) -> Table:
    """Lines of distinct pages, the first of which are common."""
    max_pages = -(-MAX_LEN // page_size)
    pages = list(range(NUM_LINES * max_pages))
    draw.shuffle(pages)
    table = np.array(pages, np.int32).reshape(NUM_LINES, max_pages)
    table[:, : common_len // page_size] = table[0, : common_len // page_size]
    return table


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 16, 64]), st.sampled_from([None, None, 1, 20, 70, 1000]))
def test_every_row_meets_every_key_it_sees_once(seed: int, page_size: int, window_len: int | None) -> None:
    draw = random.Random(seed)
    split = page_size * draw.choice([1, 2, 4])
    common_len = 2 * split
    table = table_of(draw, page_size, common_len)
    queries = []
    for line in draw.sample(range(NUM_LINES), draw.randint(1, NUM_LINES)):
        q_start = draw.choice([0, draw.randint(0, 200), draw.randint(min(common_len, 200), 200)])
        queries.append(Query(line, q_start, draw.choice([0, 1, 1, 3, 16, 17, draw.randint(1, 199)])))
    readers = tuple(index for index, query in enumerate(queries) if query.q_start >= common_len)
    shared = (Shared(0, split, readers), Shared(split, common_len, readers[:2])) if len(readers) > 1 else ()
    batch = Batch(tuple(queries), split, draw.choice([(), shared]))
    plan = plan_requests(batch, table, page_size, window_len)
    met = Met(batch, plan, page_size, window_len)

    assert plan.part_starts[0] == 0 and plan.part_starts[-1] == len(plan.order) == len(plan.tokens) == len(met.keys)
    assert sorted(plan.order.tolist()) == list(range(len(plan.order)))
    lines = np.repeat([query.line for query in queries], [query.q_len for query in queries])
    for token, position in enumerate(batch.positions().tolist()):
        rows = plan.order[plan.part_starts[token] : plan.part_starts[token + 1]].tolist()
        assert rows and all(plan.tokens[row] == token for row in rows)
        first = 0 if window_len is None else max(0, position - window_len + 1)
        want = [
            int(table[lines[token], p // page_size]) * page_size + p % page_size for p in range(first, position + 1)
        ]
        assert [place for row in rows for place in met.keys[row]] == want


def test_decoding_rows_need_one_wrapper_and_read_what_they_share_once() -> None:
    table = table_of(random.Random(0), 4, 64)
    queries = tuple(Query(line, 64 + line, 1) for line in range(NUM_LINES))
    plan = plan_requests(Batch(queries, 16, (Shared(0, 64, tuple(range(NUM_LINES))),)), table, 4, None)
    assert plan.causal.num_rows == 0
    assert len(plan.whole.last_page_lens) == 4 + NUM_LINES
    met = Met(Batch(queries, 16), plan, 4, None)
    assert met.num_read == 64 + sum(line + 1 for line in range(NUM_LINES))


def test_a_chunk_has_its_own_positions_in_the_causal_wrapper_alone() -> None:
    plan = plan_requests(Batch((Query(0, 32, 40),), 16), table_of(random.Random(0), 4, 0), 4, None)
    met = Met(Batch((Query(0, 32, 40),), 16), plan, 4, None)
    assert met.num_read < 3 * 72
    assert plan.causal.num_rows >= 40 - 1


def test_a_window_begins_at_its_first_page() -> None:
    table = table_of(random.Random(0), 16, 0)
    plan = plan_requests(Batch((Query(2, 100, 1), Query(1, 90, 5)), 32), table, 16, 20)
    assert plan.whole.num_rows == 0
    assert plan.causal.kv_indices.tolist() == [*table[2, 5:7], *table[1, 4:6]]
    assert plan.causal.last_page_lens.tolist() == [5, 15]


def test_a_step_without_tokens_is_no_request() -> None:
    for window_len in (None, 7):
        plan = plan_requests(Batch((Query(0, 5, 0),), 16), table_of(random.Random(0), 4, 0), 4, window_len)
        assert (plan.whole.num_rows, plan.causal.num_rows, plan.part_starts.tolist()) == (0, 0, [0])


def test_splits_that_begin_inside_a_page_are_refused() -> None:
    with pytest.raises(StateError, match="splits of 20 tokens are no multiple of a page of 16"):
        plan_requests(Batch((Query(0, 30, 1),), 20), table_of(random.Random(0), 16, 0), 16, None)
