"""Shared runs from lease paths, against brute force over page tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.sched.worklist import LeasedRows, leased_rows, shared_runs
from deltaserve.core.ids import RowId
from tests.control.cache.toys import Toy
from tests.control.sched.sharing import check_runs, possible_positions, shared_positions


def row(number: int, *path: tuple[int, int, int]) -> LeasedRows:
    return LeasedRows([RowId(number)], path)


def spans(rows: list[LeasedRows], split: int) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(run.start, run.end, run.rows) for run in shared_runs(rows, split)]


def test_nothing_to_share() -> None:
    assert spans([], 8) == []
    assert spans([row(0, (1, 0, 32))], 8) == []
    assert spans([row(0, (1, 0, 32)), row(1, (2, 0, 32))], 8) == []
    assert spans([row(0), row(1, (2, 0, 32))], 8) == []


def test_a_prefix_and_a_branch() -> None:
    rows = [
        row(0, (1, 0, 32), (2, 32, 64)),
        row(1, (1, 0, 32), (2, 32, 64)),
        row(2, (1, 0, 32), (3, 32, 48)),
    ]
    assert spans(rows, 16) == [(0, 32, (0, 1, 2)), (32, 64, (0, 1))]


def test_only_whole_splits_are_shared_and_a_branch_inside_one_takes_it_over() -> None:
    rows = [row(i, (1, 0, 20), (2, 20, 40)) for i in range(2)] + [row(2, (1, 0, 20))]
    assert spans(rows, 16) == [(0, 16, (0, 1, 2)), (16, 32, (0, 1))]
    assert spans(rows, 64) == []


@pytest.mark.parametrize("pools", [(64,), (64, 80)])
@given(words=st.lists(st.text("ab", max_size=7), min_size=2, max_size=6), split_pages=st.sampled_from([1, 2, 4]))
def test_runs_of_leases_are_true_and_complete(pools: tuple[int, ...], words: list[str], split_pages: int) -> None:
    toy = Toy(page_size=4, pool_pages=pools)
    leases = [toy.hold(word) for word in words]
    split = split_pages * toy.page_size
    runs = shared_runs(leased_rows((RowId(i), lease) for i, lease in enumerate(leases)), split)
    tables = {RowId(i): [lease.pages(pool) for pool in range(len(pools))] for i, lease in enumerate(leases)}
    lengths = {RowId(i): lease.num_tokens for i, lease in enumerate(leases)}
    check_runs(runs, tables, lengths, toy.page_size, split)
    assert shared_positions(runs) == possible_positions(tables, lengths, toy.page_size, split)
    for lease in leases:
        toy.cache.release(lease)
