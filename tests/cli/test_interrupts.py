"""Ctrl-C while a command still imports: exit code 130, and not a word."""

import signal
import subprocess
import sys

import pytest

from deltaserve.engine.interrupts import EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("argv", "while_importing"),
    [
        (("deltaserve.cli.main", "serve", "MODEL"), "pydantic"),
        (("deltaserve.cli.main", "serve", "MODEL"), "psutil"),
        (("deltaserve.cli.main", "bench"), "httpx"),
        (("deltaserve.engine.worker", "SPEC"), "torch"),
    ],
)
def test_an_interrupted_import_ends_without_a_word(argv: tuple[str, ...], while_importing: str) -> None:
    """The interpreter tells on stderr what it imports: everything else there would be ours."""
    command = [sys.executable, "-X", "importtime", "-m", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        next(line for line in process.stderr if while_importing in line)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == EXIT_INTERRUPTED
    assert all(line.startswith("import time:") for line in rest.splitlines())
