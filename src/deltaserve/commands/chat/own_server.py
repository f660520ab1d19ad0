"""A server of this program's own: another process, for as long as a block of code runs. For `chat` and the demo."""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread

from deltaserve.core.errors import ConfigError
from deltaserve.process.children.exits import Exit, how_it_ended
from deltaserve.process.children.parent import die_with_parent

SERVE = "deltaserve.cli.main"
_SERVING = "serving at "
_PREFIX = "deltaserve: "
_GRACE_S = 60.0
"""Longest wait for a server that was told to end; it has a grace of its own, which is shorter."""
_TAIL_LINES = 20


class OwnServerError(Exception):
    """The server ended before it was ready. One line."""


@contextmanager
def own_server(module: str, argv: Sequence[str], tell: Callable[[str], None]) -> Iterator["subprocess.Popen[str]"]:
    """`python -m MODULE ARGV`, ready when the block begins, ended after it; it also ends when this process does.

    `tell` hears each line it says until it is ready. Ctrl-C does not reach it: it has a session of its own. Raises
    ConfigError with its reason when that is a wrong setting, else OwnServerError.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    try:
        _wait_ready(process, tell)
        yield process
    finally:
        _end(process)


def wait_for_end(process: "subprocess.Popen[str]") -> None:
    """Wait until the user interrupts. Raises OwnServerError when the server ends before, by itself."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        return
    raise OwnServerError(f"the server ended with {how_it_ended(code)}")


def _wait_ready(process: "subprocess.Popen[str]", tell: Callable[[str], None]) -> None:
    lines: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=_read, args=(process, lines), name="server-output", daemon=True).start()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    while (line := lines.get()) is not None:
        if _SERVING in line:
            return
        tail.append(line)
        tell(line)
    code = process.wait()
    reason = tail[-1] if tail else f"it ended with {how_it_ended(code)}"
    raise ConfigError(reason) if code == Exit.CONFIG else OwnServerError(f"the server did not start ({reason})")


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str | None]") -> None:
    """Read to the end of what the server says, so that it never waits for a reader."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line.rstrip().removeprefix(_PREFIX))
    lines.put(None)


def _end(process: "subprocess.Popen[str]") -> None:
    """Tell the server to drain; what is left after its grace, or when the user is not so patient, is killed with
    its children."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
