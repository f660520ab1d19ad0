"""Somebody who types at a terminal: a command with a pseudo-terminal for its input and output."""

import fcntl
import os
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.e2e.server import environment
from tests.patience import PATIENCE_S

CTRL_C, CTRL_D = "\x03", "\x04"
_LOOK_S = 1.0


class Typist:
    """`python -m MODULE ARGV` in a session of its own, whose terminal this is."""

    def __init__(self, folder: Path, *argv: str, module: str = "deltaserve.cli.main", columns: int = 200) -> None:
        self._terminal, theirs = os.openpty()
        self._seen, self._at = "", 0
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment(folder), "TERM": "xterm", "COLUMNS": str(columns)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # whose keys are its signals
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, words: str) -> str:
        """What came up to these words, which are behind then. Raises AssertionError when they do not come."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._seen.find(words, self._at)) < 0:
            assert time.monotonic() < deadline, f"no {words!r} in:\n{self._seen}"
            assert self._read(), f"ended without {words!r}:\n{self._seen}"
        before, self._at = self._seen[self._at : found], found + len(words)
        return before

    def shows_keys(self) -> bool:
        """Whether the terminal shows what is typed, and hands it on in lines: as a shell left it."""
        flags = termios.tcgetattr(self._terminal)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        while self._read():
            pass
        return self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        os.close(self._terminal)

    def _read(self) -> bool:
        """Whether it may show more."""
        if not select.select([self._terminal], [], [], _LOOK_S)[0]:
            return True
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # nobody has the other end any more
            return False
        self._seen += data.decode(errors="replace")
        return bool(data)
