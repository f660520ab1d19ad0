"""docs/clients.md: a row for each client, and the names of its checks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill

_HEAD = """# Clients

What unmodified clients of other projects do with a server: the newest versions that the package index had on the day
of the run, each in an environment of its own; prefill and decode apart on a CPU. `make clients`
(`python -m tools.clients.client_table`) runs them and writes this page; `make clients ARGS="openai node"` runs those
two and leaves the other rows as they are. The checks are in `tools/clients`. `make test-full` runs all of them,
`make test` those that need no environment: openai, and Chromium where it is installed (`tests/e2e/test_clients.py`).

Libraries and the browser talk to SmolLM2-135M with a template that shows tools. A small model says little that is
right: what is checked is form, and that forced calls and structured answers are what was asked for. Load generators and
the evaluation harness talk to `models/recall-micro`, whose right answers are known: lm-eval must score 1.0, and the
cache report of sglang's benchmark must say what the server counted.

That benchmark is installed without what only sglang's kernels need, and torchvision, which it imports for images, is an
empty module (`tools/clients/run_sglang.py`). Routers are in P/D mode before a prefill and a decode worker with
`--http`, and must answer as the server does ([deploy](deploy.md#sglangs-pd-mode)). Dynamo's frontend is before a worker
of `deltaserve dynamo`, without etcd and NATS ([deploy](deploy.md#nvidia-dynamo)), installed without aisimulate, whose
wheel is on NVIDIA's index. Where the project's torch is a build for CPUs, the clients' is too. The browser is Debian's
`chromium-headless-shell`; its page is at another origin, the one that the server allows.

| client | version | day | passed | what failed |
|---|---|---|---|---|
"""
_DETAILS = "Checks, by client:"


@dataclass(frozen=True, slots=True)
class Row:
    """One client's result."""

    client: str
    version: str
    day: str
    checks: Sequence[str]
    failed: Sequence[tuple[str, str]]
    """(check, what went wrong)"""

    def __str__(self) -> str:
        failed = "; ".join(f"{check}: {told}".replace("|", "/") for check, told in self.failed)
        passed = len(self.checks) - len(self.failed)
        return f"| {self.client} | {self.version} | {self.day} | {passed} of {len(self.checks)} | {failed} |"

    @property
    def details(self) -> str:
        """The names of its checks, as a point of a list."""
        return fill(f"- {self.client}: {', '.join(self.checks)}.", 120, subsequent_indent="  ")


def page_of(rows: Iterable[Row], names: Sequence[str], before: str) -> str:
    """The page with these rows; the rest of `names`, in whose order they come, stays as it was `before`, if it was."""
    lines = _lines_of(before) | {row.client: str(row) for row in rows}
    details = _details_of(before) | {row.client: row.details for row in rows}
    table = "".join(f"{lines[name]}\n" for name in names if name in lines)
    return f"{_HEAD}{table}\n{_DETAILS}\n\n" + "".join(f"{details[name]}\n" for name in names if name in details)


def _lines_of(page: str) -> dict[str, str]:
    """Client |-> its line of the table."""
    _, _, table = page.partition("|---|\n")
    return {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}


def _details_of(page: str) -> dict[str, str]:
    """Client |-> its point of the list."""
    _, _, details = page.partition(_DETAILS)
    points = re.findall(r"^- [^:]+:.*(?:\n  .*)*", details, re.MULTILINE)
    return {point[2:].partition(":")[0]: point for point in points}
