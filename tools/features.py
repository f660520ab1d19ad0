"""Which rows of docs/features.md hold: runs the commands that show them.

    python -m tools.features [ID ...] [--limit-s N]

Without ids: every row that is done. Commands that name nothing but tests run together, one pytest process per folder
of tests/; each other command runs by itself, once. Prints one line per row, then how many hold; how far it is goes to
stderr. Exit code 1 when a command fails, 2 for a row that does not exist.
"""

import argparse
import contextlib
import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "features.md"
STATES = ("done", "part", "open", "issue 9", "issue 10", "issue 11", "issue 12", "not planned")
_GRACE_S = 30.0
_OUTCOME = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)( \(.*)? +\[ *\d+%\]$")
_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (tests/\S.*)$")
"""A test's line at the end. A library that writes to stderr cuts the one that tells how far it is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the matrix."""

    id: str
    what: str
    source: str
    state: str
    commands: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Verdict:
    holds: bool
    line: str = ""
    """Why it does not."""


def read_rows(text: str) -> tuple[Row, ...]:
    """The rows of all tables whose first cell is an id such as A1."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"[A-Z]\d+", cells[0]):
            if len(cells) != 6:
                raise ValueError(f"{cells[0]}: {len(cells)} cells; id, what, source, state, command, note are 6")
            name, what, source, state, command, note = cells
            rows.append(Row(name, what, source, state, tuple(re.findall(r"`([^`]+)`", command)), note))
    return tuple(rows)


def nodes_of(command: str) -> tuple[str, ...]:
    """The tests that a command consists of; empty when it is more than `pytest TEST ...`."""
    program, *names = command.split()
    return tuple(names) if program == "pytest" and all(name.startswith("tests/") for name in names) else ()


def choose(rows: Sequence[Row], ids: Iterable[str]) -> tuple[Row, ...]:
    """The rows asked for, by default those that are done. Raises ValueError for an id that is none."""
    known = {row.id: row for row in rows}
    chosen = []
    for name in ids:
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=4, cutoff=0.4)
            raise ValueError(f"{name}: no such row{'; near it: ' + ' '.join(near) if near else ''}")
        chosen.append(known[name])
    return tuple(chosen) or tuple(row for row in rows if row.state == "done")


def verdict_of_test(node: str, outcomes: Mapping[str, str], reasons: Mapping[str, str]) -> Verdict:
    """A test holds when it ran with every parameter that was asked for and nothing but passed."""
    cases = [name for name in outcomes if name == node or name.startswith((f"{node}[", f"{node}::"))]
    if not cases:
        return Verdict(holds=False, line=reasons.get(node, f"{node} did not run"))
    for name in cases:
        if outcomes[name] != "PASSED":
            return Verdict(holds=False, line=reasons.get(name, f"{name} {outcomes[name].lower()}"))
    return Verdict(holds=True)


def both(first: Verdict, second: Verdict) -> Verdict:
    return first if not first.holds else second


def run(argv: Sequence[str], limit_s: float) -> Iterator[str]:
    """Lines of a command's output as they come; the last one says how it ended, unless that was well. An interrupt
    first, so that tests end the servers they started."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "240",
    }
    process = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    timers = [
        threading.Timer(limit_s, process.send_signal, [signal.SIGINT]),
        threading.Timer(limit_s + _GRACE_S, _kill_group, [process.pid]),
    ]
    for timer in timers:
        timer.start()
    assert process.stdout is not None
    with process.stdout as output:
        yield from (line.rstrip() for line in output)
    code = process.wait()
    is_late = not timers[0].is_alive()
    for timer in timers:
        timer.cancel()
    if is_late:
        yield f"ended by the limit of {limit_s:g} s"
    elif code:
        yield f"exit code {code}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Heard:
    """What pytest's lines say so far."""

    outcomes: dict[str, str] = field(default_factory=dict)
    """Test with its parameters |-> the worst that was said of it."""
    reasons: dict[str, str] = field(default_factory=dict)
    last: str = ""
    """The last line that was not empty."""

    def hear(self, line: str) -> bool:
        """Whether the line is about a test that has just ended."""
        self.last = line or self.last
        if found := _OUTCOME.match(line):
            name, outcome = found[1], found[2]
            self.outcomes[name] = outcome if self.outcomes.get(name, "PASSED") == "PASSED" else self.outcomes[name]
            return True
        if found := _SUMMARY.match(line):
            name, _, why = found[2].partition(" - ")
            self.outcomes.setdefault(name, found[1])
            if why:
                self.reasons[name] = f"{name}: {why}"
        return False


def run_tests(nodes: Sequence[str], limit_s: float) -> dict[str, Verdict]:
    """Each test |-> whether it holds, from one pytest process."""
    argv = [sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=no", "-rA", "-m", "not slow", *nodes]
    heard = Heard()
    for line in run(argv, limit_s):
        if heard.hear(line):
            tell(f"   {' '.join(line.split())}")
    outcomes, reasons, last = heard.outcomes, heard.reasons, heard.last
    if last.startswith(("ended by", "exit code")):
        reasons |= {node: f"{node}: {last}" for node in nodes if not any(name.startswith(node) for name in outcomes)}
    return {node: verdict_of_test(node, outcomes, reasons) for node in nodes}


def run_command(command: str, limit_s: float) -> Verdict:
    """One command of its own."""
    words = shlex.split(command)
    python = {"python": [], "pytest": ["-m", "pytest"], "deltaserve": ["-m", "deltaserve.cli.main"]}
    argv = [sys.executable, *python[words[0]], *words[1:]] if words[0] in python else words
    lines = [""]
    for line in run(argv, limit_s):
        if line:
            lines.append(line)
            tell(f"   {line}")
    if lines[-1].startswith(("ended by the limit", "exit code ")):
        return Verdict(holds=False, line=f"{lines[-1]}: {lines[-2]}")
    return Verdict(holds=True)


def judge(rows: Sequence[Row], limit_s: float) -> dict[str, Verdict]:
    """Each command of the rows |-> whether it holds."""
    commands = dict.fromkeys(command for row in rows for command in row.commands)
    folders: dict[str, dict[str, None]] = {}
    for command in commands:
        for node in nodes_of(command):
            folders.setdefault(node.split("::")[0].rpartition("/")[0], {})[node] = None
    tests: dict[str, Verdict] = {}
    for folder, nodes in folders.items():
        tell(f"== {folder}: {len(nodes)} tests")
        tests |= run_tests(list(nodes), limit_s)
    verdicts = {}
    for command in commands:
        verdict = Verdict(holds=True)
        for node in nodes_of(command):
            verdict = both(verdict, tests[node])
        if not nodes_of(command):
            tell(f"== {command}")
            verdict = run_command(command, limit_s)
        verdicts[command] = verdict
    return verdicts


def line_of(row: Row, verdicts: Mapping[str, Verdict]) -> tuple[str, Verdict | None]:
    """What is printed about a row, and its verdict where it names a command."""
    start = f"{row.id:4} {row.state:12}"
    if not row.commands:
        return f"{start} -      {row.note}".rstrip(), None
    verdict = Verdict(holds=True)
    for command in row.commands:
        verdict = both(verdict, verdicts[command])
    return f"{start} {'holds' if verdict.holds else 'FAILS'}  {verdict.line or row.what}"[:200], verdict


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows such as A1 T5 (default: all that are done)")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of each process (default 1800)")
    arguments = parser.parse_args(argv)
    try:
        rows = choose(read_rows(PAGE.read_text()), arguments.ids)
    except ValueError as error:
        print(f"features: {error}", file=sys.stderr)
        return 2
    verdicts = judge(rows, arguments.limit_s)
    lines = [line_of(row, verdicts) for row in rows]
    for line, _ in lines:
        print(line)
    judged = Counter(verdict.holds for _, verdict in lines if verdict is not None)
    print(
        f"{len(rows)} rows: {judged[True]} hold, {judged[False]} fail, {len(rows) - judged.total()} without a command"
    )
    return 1 if judged[False] else 0


if __name__ == "__main__":
    sys.exit(main())
