"""How a process ends by itself, and how that is told."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from deltaserve.process.children.child_events import Ended
from deltaserve.process.children.exits import Exit, how_it_ended
from tests.patience import PATIENCE_S

_STUCK = """
from deltaserve.process.children.exits import end_stuck
from deltaserve.process.children.terminal import LogSpec, start_log
start_log("decode-0", LogSpec(), None)
end_stuck("no turn")"""


def test_a_stuck_process_ends_where_nobody_reads_its_stderr() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    size = fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    assert os.write(theirs, b"x" * size) == size
    os.set_blocking(theirs, True)
    try:
        done = subprocess.run([sys.executable, "-c", _STUCK], stderr=theirs, timeout=PATIENCE_S, check=False)
        assert done.returncode == Exit.STUCK
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_stuck_process_shows_where_its_threads_are() -> None:
    done = subprocess.run([sys.executable, "-c", _STUCK], capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == Exit.STUCK
    assert b"most recent call first" in done.stderr
    assert b"end_stuck" in done.stderr
    assert b"process ends: no turn" in done.stderr


def test_a_stuck_process_without_a_stderr_ends_as_well() -> None:
    program = (
        "import sys\nfrom deltaserve.process.children.exits import end_stuck\nsys.stderr = None\nend_stuck('no turn')"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == Exit.STUCK


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_with_a_closed_stream_ends_with_its_code(stream: str) -> None:
    program = f"import sys\nfrom deltaserve.process.children.exits import Exit, leave\nsys.{stream} = None\n"
    command = [sys.executable, "-c", f"{program}leave(Exit.QUARANTINE)"]
    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == Exit.QUARANTINE


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exit code 3"), (-9, "signal SIGKILL"), (-37, "signal 37"), (-signal.SIGRTMIN, "signal SIGRTMIN")],
)
def test_every_end_has_words(code: int, text: str) -> None:
    assert how_it_ended(code) == text
    assert text in str(Ended("decode-0", code, ("a line",)))
