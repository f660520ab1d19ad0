"""The work list of Triton's kernels: every row meets every key it sees once, and what is shared is read once."""

import random
from itertools import chain

import numpy as np
import pytest

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.plan import TileSize, WorkTiles, plan_work, shared_runs, sharers

SIZES = (TileSize(16, 32), TileSize(64, 32))
PAGE, SPLIT = 4, 16
TABLE = np.arange(8 * 200, dtype=np.int32).reshape(8, 200)


def plan(batch: Batch, group_size: int = 2, window_len: int | None = None) -> WorkTiles:
    return plan_work(batch, TABLE, PAGE, group_size, window_len, SIZES)


def seen(work: WorkTiles, num_tokens: int, group_size: int, window_len: int | None) -> list[list[list[int]]]:
    """Per token and head of a group the keys its tiles hold of those it sees, in the order of its partial results."""
    parts: list[dict[int, list[int]]] = [{} for _ in range(num_tokens * group_size)]
    for tiles, size in zip((work.short, work.long), SIZES, strict=True):
        for first_token, first_row, num_rows, start, low, end, _, part in tiles.tolist():
            assert start <= max(low, start)
            for row in range(first_row, min(first_row + size.rows, num_rows)):
                token = int(work.tokens[first_token + row // group_size])
                position = int(work.positions[token])
                lowest = low if window_len is None else max(low, position - window_len + 1)
                of_row = parts[token * group_size + row % group_size]
                place = int(work.first_parts[token]) + part
                assert work.part_starts[token] <= place < work.part_starts[token + 1]
                assert place not in of_row, "computed twice"
                of_row[place] = list(range(max(start, lowest), min(end, position + 1)))
    for number, of_row in enumerate(parts):
        token = number // group_size
        assert sorted(of_row) == list(range(work.part_starts[token], work.part_starts[token + 1])), "left out"
    return [[of_row[place] for place in sorted(of_row)] for of_row in parts]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_meets_every_key_it_sees_once(seed: int) -> None:
    draw = random.Random(seed)
    group_size, window_len = draw.choice([1, 2, 5]), draw.choice([None, None, 1, 20, 70])
    queries = []
    for line in range(draw.randint(1, 6)):
        q_len = draw.choice([1, 1, 3, 16, 17, draw.randint(1, 150)])
        queries.append(Query(line, draw.randint(64, 300), q_len))
    shared = (Shared(0, 32, tuple(range(len(queries)))), Shared(32, 64, tuple(range(1, len(queries)))))
    batch = Batch(tuple(queries), SPLIT, draw.choice([(), shared]))
    rows = seen(plan(batch, group_size, window_len), batch.num_tokens, group_size, window_len)
    for token, position in enumerate(batch.positions().tolist()):
        first = 0 if window_len is None else max(0, position - window_len + 1)
        for pieces in rows[token * group_size : (token + 1) * group_size]:
            assert list(chain.from_iterable(pieces)) == list(range(first, position + 1))


def test_what_is_shared_is_one_item_for_all_who_see_it_whole() -> None:
    queries = tuple(Query(line, 64 + line, 1) for line in range(8))
    shared = Batch(queries, SPLIT, (Shared(0, 64, tuple(range(8))),))
    assert len(plan(shared).short) == 4 + 8  # 16 rows are one tile; and a tail each
    assert len(plan(Batch(queries, SPLIT)).short) == 5 * 8
    # Position 64 + n sees [n + 25, ...]: the split from 32 is whole for all; the last sees nothing of that from 16.
    assert len(plan(shared, window_len=40).short) == 2 + 7 + 8


def test_lines_and_pages() -> None:
    work = plan(Batch((Query(5, 0, 3), Query(2, 7, 1)), SPLIT))
    assert work.pages.tolist() == [*TABLE[5, :2], *TABLE[2, :2]]
    assert work.short[:, 6].tolist() == [2, 0]  # rows that decode stand first


def test_a_chunk_of_many_positions_is_few_pieces() -> None:
    work = plan(Batch((Query(0, 500, 100), Query(1, 600, 1)), SPLIT))
    assert work.part_starts.tolist() == [*range(101), 100 + 600 // SPLIT + 1]


@pytest.mark.parametrize("seed", range(60))
def test_a_split_is_read_together_by_all_who_see_it_whole(seed: int) -> None:
    """Each of the run's splits, once: what the native library and the kernels for GPUs are told alike."""
    draw = random.Random(seed)
    window_len = draw.choice([None, draw.randint(1, 40), draw.randint(1, 300)])
    common = draw.randint(1, 12) * SPLIT
    queries = tuple(Query(row, common + draw.randint(0, 90), draw.choice([1, 1, 3, 16, 40])) for row in range(7))
    cut = draw.randint(0, common // SPLIT) * SPLIT
    runs = tuple(Shared(*ends, tuple(range(7))) for ends in ((0, cut), (cut, common)) if ends[0] < ends[1])
    batch = Batch(queries, SPLIT, runs)
    got = [(start, run.queries) for run in shared_runs(batch, window_len) for start in range(run.start, run.end, SPLIT)]
    want = []
    for run in runs:
        for start in range(run.start, run.end, SPLIT):
            lows = {index: 0 if window_len is None else queries[index].q_end - window_len for index in range(7)}
            candidates = [
                index for index in range(7) if queries[index].q_len == 1 or index in narrow(batch, window_len)
            ]
            readers = tuple(index for index in candidates if lows[index] <= start)
            if len(readers) > 1:
                want.append((start, readers))
    assert got == want


def narrow(batch: Batch, window_len: int | None) -> set[int]:
    """Queries whose pieces are splits: of one position, or of several with few partial results."""
    found = set()
    for index, query in enumerate(batch.queries):
        low = 0 if window_len is None else max(0, query.q_start - window_len + 1)
        pieces = (query.q_end - 1) // SPLIT - low // SPLIT + 1
        if query.q_len == 1 or (query.q_len <= 16 and (pieces == 1 or query.q_len * pieces <= 128)):
            found.add(index)
    return found


def test_a_long_query_reads_alone() -> None:
    queries = (Query(0, 192, 1), Query(1, 192, 1), Query(2, 192, 38))
    assert sharers(Batch(queries, SPLIT), Shared(0, 192, (0, 1, 2))) == (0, 1)
