"""Shared runs by brute force: compare page tables, token by token."""

from collections.abc import Mapping, Sequence

from deltaserve.control.sched.plan import SharedRun
from deltaserve.core.ids import PageId, RowId

Table = Sequence[Sequence[PageId | None]]
"""Per pool: a row's pages."""


def check_runs(
    runs: Sequence[SharedRun],
    tables: Mapping[RowId, Table],
    q_starts: Mapping[RowId, int],
    page_size: int,
    split_tokens: int,
) -> None:
    """Every run is true, whole splits, before the row's own positions; no row reads a position in two runs."""
    seen: dict[RowId, set[int]] = {row: set() for row in tables}
    for run in runs:
        assert 0 <= run.start < run.end
        assert run.start % split_tokens == run.end % split_tokens == 0
        assert len(set(run.rows)) == len(run.rows) >= 2
        lines = {
            tuple(tuple(pool[run.start // page_size : run.end // page_size]) for pool in tables[r]) for r in run.rows
        }
        assert len(lines) == 1, "rows of a run have other pages"
        for row in run.rows:
            assert run.end <= q_starts[row]
            positions = set(range(run.start, run.end))
            assert not positions & seen[row], "a row reads positions twice"
            seen[row] |= positions


def shared_positions(runs: Sequence[SharedRun]) -> set[tuple[RowId, RowId, int]]:
    """(row, row, position) of every pair that shares."""
    return {
        (a, b, position)
        for run in runs
        for a in run.rows
        for b in run.rows
        if a < b
        for position in range(run.start, run.end)
    }


def possible_positions(
    tables: Mapping[RowId, Table], leased: Mapping[RowId, int], page_size: int, split_tokens: int
) -> set[tuple[RowId, RowId, int]]:
    """The most that could be shared: whole splits of two rows' leases, up to where their pages part."""
    found = set()
    for a in tables:
        for b in tables:
            if a >= b:
                continue
            limit = min(leased[a], leased[b]) // page_size
            agree = 0
            while agree < limit and all(x[agree] == y[agree] for x, y in zip(tables[a], tables[b], strict=True)):
                agree += 1
            end = agree * page_size // split_tokens * split_tokens
            found |= {(a, b, position) for position in range(end)}
    return found
