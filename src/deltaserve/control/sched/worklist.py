"""Which decode rows read the same pages: leases say so, hence no page is compared.

A row's lease path is a list of (node, start, end) token ranges, root to leaf. Rows whose paths agree up to token x
share the pages of [0, x). Shared runs are whole splits only, so the remainder next to a divergence is read privately
by each row and a row's partition depends on nothing but its own positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.control.sched.plan import SharedRun
from deltaserve.core.ids import RowId

Path = Sequence[tuple[int, int, int]]
"""(node id, start, end): token ranges, root to leaf, without gaps."""


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A decode row and what it leases."""

    row: RowId
    path: Path


def shared_runs(rows: Sequence[LeasedRow], split_tokens: int) -> tuple[SharedRun, ...]:
    """Runs of whole splits read by two rows or more, root to leaf. Rows of one run stand next to each other."""
    runs: list[SharedRun] = []
    pending = [(list(rows), 0, 0)]  # rows that share everything up to `depth`, of which [0, start) is listed already
    while pending:
        group, depth, start = pending.pop()
        for node_rows in _by_node(group, depth):
            if len(node_rows) < 2:
                continue
            end = node_rows[0].path[depth][2] // split_tokens * split_tokens
            if end > start:
                runs.append(SharedRun(start, end, tuple(r.row for r in node_rows)))
            pending.append((node_rows, depth + 1, max(start, end)))
    return tuple(runs)


def _by_node(rows: list[LeasedRow], depth: int) -> list[list[LeasedRow]]:
    groups: dict[int, list[LeasedRow]] = {}
    for row in rows:
        if depth < len(row.path):
            groups.setdefault(row.path[depth][0], []).append(row)
    return list(groups.values())
