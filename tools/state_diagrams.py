"""Draws tables of the code into docs/reliability.md, between their markers: transitions, and situations of runs.

python -m tools.state_diagrams            rewrites the page
"""

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from deltaserve.control.cache.pages import PAGE_TRANSITIONS
from deltaserve.control.engine.status import DECODE_TABLE, PREFILL_TABLE
from deltaserve.control.peer.table import PEER_TRANSITIONS
from deltaserve.control.transfer.tables import RECEIVER, SENDER, SENDER_UNREACHABLE
from deltaserve.sim.situations import RUNS_PER_RATE, Situation

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
_TRANSITIONS, _SITUATIONS = "tables", "situations"

_TABLES: tuple[tuple[str, Mapping[Any, Mapping[Any, Any]]], ...] = (
    ("page (control/cache/pages.py)", PAGE_TRANSITIONS),
    ("ticket on decode (control/transfer/tables.py, RECEIVER)", RECEIVER),
    ("ticket on prefill (SENDER; * = no control plane comes to it)", SENDER),
    ("room on decode (control/engine/status.py)", DECODE_TABLE),
    ("room on prefill", PREFILL_TABLE),
    ("peer (control/peer/table.py)", PEER_TRANSITIONS),
)


def drawing() -> str:
    """Every table: a line per state, its events and where they lead."""
    blocks = []
    for title, table in _TABLES:
        lines = [title]
        for state, cells in table.items():
            moves = [f"{_event(state, event)} -> {target.name}" for event, target in cells.items()]
            lines.append(f"  {state.name:<12} {',  '.join(moves) or '(end)'}")
        blocks.append("\n".join(lines))
    return "```\n" + "\n\n".join(blocks) + "\n```"


def _event(state: Enum, event: Enum) -> str:
    return f"{event.name.lower()}{'*' if (state, event) in SENDER_UNREACHABLE else ''}"


def situations() -> str:
    """What simulated runs must have met, and in how many of them at least."""
    rows = [f"| {situation.words} | {situation.least:,} |" for situation in Situation]
    return "\n".join([f"| situation | runs of {RUNS_PER_RATE:,}, at least |", "|---|---|", *rows])


def redrawn(page: str) -> str:
    """The page with the present tables between their markers."""
    for name, drawn in ((_TRANSITIONS, drawing()), (_SITUATIONS, situations())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{drawn}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text()))
    sys.exit(0)
