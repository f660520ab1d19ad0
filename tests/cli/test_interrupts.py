"""A stop signal while a command still imports: its exit code at once, and not a word."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("argv", "while_importing"),
    [
        (("deltaserve.cli.main", "serve", "MODEL"), "pydantic"),
        (("deltaserve.cli.main", "serve", "MODEL"), "psutil"),
        (("deltaserve.cli.main", "bench"), "httpx"),
        (("deltaserve.process.worker.worker", "SPEC"), "torch"),
    ],
)
def test_an_interrupted_import_ends_without_a_word(
    argv: tuple[str, ...], while_importing: str, number: signal.Signals
) -> None:
    """The interpreter tells on stderr what it imports: everything else there would be ours.

    Through a pipe that holds fifty lines, so that it cannot be far ahead of what was read when the signal is sent.
    """
    command = [sys.executable, "-X", "importtime", "-m", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        next(line for line in process.stderr if while_importing in line)
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == 128 + number
    assert all(line.startswith("import time:") for line in rest.splitlines())


def test_a_stop_signal_that_arrives_while_one_program_replaces_another_is_not_lost() -> None:
    """`prefill` and `decode` become their worker by exec, which forgets handlers; the first process of a container
    ignores what it has no handler for."""
    successor = "from deltaserve.process.children.interrupts import end_silently; end_silently(); print('too far')"
    program = f"""
import os, signal, sys
from deltaserve.process.children.interrupts import end_silently, hold_for_successor
end_silently()
hold_for_successor()
signal.raise_signal(signal.SIGTERM)
os.execv(sys.executable, [sys.executable, "-c", {successor!r}])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, b"", b"")
