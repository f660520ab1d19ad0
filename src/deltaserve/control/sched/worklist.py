"""Which decode rows read the same pages: leases say so, hence no page is compared.

A row's lease path is a list of (node, start, end) token ranges, root to leaf. Rows whose paths agree up to token x
share the pages of [0, x). Shared runs are whole splits only, so the remainder next to a divergence is read privately
by each row and a row's partition depends on nothing but its own positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltaserve.control.cache.prefix_cache import Lease
from deltaserve.control.cache.radix import Node
from deltaserve.control.sched.plan import SharedRun
from deltaserve.core.ids import RowId

Path = Sequence[tuple[int, int, int]]
"""(node id, start, end): token ranges, root to leaf, without gaps."""


@dataclass(frozen=True, slots=True)
class LeasedRows:
    """Decode rows that lease the same nodes, beside those that nobody else leases."""

    rows: Sequence[RowId]
    path: Path


def leased_rows(leases: Iterable[tuple[RowId, Lease]]) -> list[LeasedRows]:
    """Rows with their leases, without those that have no node in common with anybody: a path is made once for all rows
    that have it, not for each."""
    rows_of: dict[Node, list[RowId]] = {}
    lease_of: dict[Node, Lease] = {}
    for row, lease in leases:
        last = lease.last_common()
        if last is not None:
            rows_of.setdefault(last, []).append(row)
            lease_of[last] = lease
    return [LeasedRows(rows, lease_of[last].path(last)) for last, rows in rows_of.items()]


def shared_runs(leased: Sequence[LeasedRows], split_tokens: int) -> tuple[SharedRun, ...]:
    """Runs of whole splits read by two rows or more, root to leaf. Rows of one run stand next to each other."""
    runs: list[SharedRun] = []
    pending = [(list(leased), 0, 0)]  # what shares everything up to `depth`, of which [0, start) is listed already
    while pending:
        group, depth, start = pending.pop()
        for alike in _by_node(group, depth):
            rows = tuple(row for one in alike for row in one.rows)
            if len(rows) < 2:
                continue
            end = alike[0].path[depth][2] // split_tokens * split_tokens
            if end > start:
                runs.append(SharedRun(start, end, rows))
            pending.append((alike, depth + 1, max(start, end)))
    return tuple(runs)


def _by_node(leased: list[LeasedRows], depth: int) -> list[list[LeasedRows]]:
    groups: dict[int, list[LeasedRows]] = {}
    for one in leased:
        if depth < len(one.path):
            groups.setdefault(one.path[depth][0], []).append(one)
    return list(groups.values())
