"""What a test run says while it runs, on stderr: how far it is, at intervals; of a failed test at once where and why;
with `--progress NAME`, which scripts/test gives, no dots between, and the reasons of all skips at the end.
"""

import os
import threading
import time
from collections import Counter

import pytest

_EVERY_S = 30.0
_MAX_REASON = 240


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """`file:line: first line of the error`; of an error without a place the last line said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        path = os.path.relpath(crash.path)
        first = next(iter(crash.message.strip().splitlines()), "")
        return f"{path if not path.startswith('..') else crash.path}:{crash.lineno}: {first}"[:_MAX_REASON]
    lines = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON] if lines else "no reason was given"


class Progress:
    """Progress of a run; with pytest-xdist that of the process that hears of all others."""

    def __init__(self, stderr: int, name: str | None) -> None:
        """`stderr`: that of the run, because while a test runs pytest keeps what goes to 2. Without `name` only
        failures are told."""
        self._stderr = stderr
        self._name = name
        self._num_tests = 0
        self._num_done = 0
        self._num_failed = 0
        self._running: dict[str, None] = {}
        self._skips: Counter[str] = Counter()
        self._began = time.monotonic()
        self._is_over = threading.Event()

    # ------------------------------------------------------------ what pytest tells

    def pytest_sessionstart(self) -> None:
        if self._name is not None:
            threading.Thread(target=self._tell, daemon=True).start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_tests = max(self._num_tests, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._num_tests = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._num_done += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._say(f"FAILED NOW {report.nodeid} ({report.when}) {reason_of(report)}")
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._say(f"FAILED NOW {report.nodeid} (collection) {reason_of(report)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No letters: lines at intervals say more in a log of thousands of tests."""
        if self._name is None or hasattr(report, "wasxfail"):
            return None
        if report.failed and report.when != "call":
            return "error", "", "ERROR"
        return (
            (report.outcome, "", report.outcome.upper()) if not report.passed or report.when == "call" else ("", "", "")
        )

    def pytest_sessionfinish(self) -> None:
        self._is_over.set()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._name is not None and self._skips:
            terminalreporter.write_line("skipped:")
            for reason, count in self._skips.most_common():
                terminalreporter.write_line(f"  {count:5,} x {reason}")

    # ------------------------------------------------------------ what is told

    def _tell(self) -> None:
        """Until the run is over; a run shorter than the interval says nothing."""
        while not self._is_over.wait(_EVERY_S):
            self._say(self.line())

    def line(self) -> str:
        """How far the run is."""
        total = f" of {self._num_tests:,}" if self._num_tests else ""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        now = next(iter(self._running), None)
        what = "collecting" if not self._num_tests else f"in {now}" if now else "between tests"
        took = f"{minutes} min {seconds:02} s"
        return f"{self._name} {self._num_done:,}{total}, {self._num_failed} failed, {took}, {what}"

    def _say(self, text: str) -> None:
        line = f"{text}\n" if self._name is not None else f"\n{text}\n"
        os.write(self._stderr, line.encode(errors="backslashreplace"))
