"""Where a child's output goes: a file, bounded, and never a reason for anybody to end; or the supervisor's stdout."""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_STDOUT = 1
_TAIL_BYTES = 4096
_COPY_BYTES = 1 << 20


_ORDINARY = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ \S+ (rank \d+ )?(INFO|DEBUG) |\{.*\"level\": \"(info|debug)\"")
_FEW_LINES = 3


def telling(lines: tuple[str, ...], code: int) -> tuple[str, ...]:
    """Last lines of a log that may say why its process ended with this code (negative: a signal).

    Where none does, the last few; but none of a process that a signal ended: it was told nothing it could have written.
    """
    found = tuple(line for line in lines if not _ORDINARY.match(line))
    return found or (lines[-_FEW_LINES:] if code >= 0 else ())


class Output(Protocol):
    """Where a child's output goes."""

    problem: str | None
    """Why it does not go where it was asked to."""

    def fileno(self) -> int: ...

    def rotate(self, max_bytes: int) -> None:
        """Keep the file bounded."""

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines this start wrote, unless the user has seen them."""

    def close(self) -> None: ...


class OwnOutput:
    """The output of the process that starts the child: whoever collects it has all lines."""

    problem: str | None = None

    def __init__(self, descriptor: int = _STDOUT) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def rotate(self, max_bytes: int) -> None:
        pass

    def tail(self, num_lines: int) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


class LogFile:
    """One start's output, appended. Where no file can be opened, memory takes its place.

    All through a descriptor: the name may be removed, or its folder, while the child runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None
        """Why there is no file."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.problem = f"no log at {path}: {error.strerror}"
            self._fd = os.memfd_create(path.name)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        self._start = os.fstat(self._fd).st_size

    def fileno(self) -> int:
        return self._fd

    def rotate(self, max_bytes: int) -> None:
        """Move what was written to `<log>.1` when it is more than `max_bytes`. The child goes on with its descriptor.

        What cannot be copied, and lines written between copy and cut, are lost: a log may be, a disk must not fill up.
        """
        size = os.fstat(self._fd).st_size
        if size <= max_bytes:
            return
        kept = self._path.with_name(self._path.name + ".1")
        try:
            self._copy(kept, size)
        except OSError:
            with suppress(OSError):
                kept.unlink()  # a part of it would only take room
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            self._start = 0

    def _copy(self, kept: Path, size: int) -> None:
        descriptor = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as out:
            offset = 0
            while offset < size and (chunk := os.pread(self._fd, _COPY_BYTES, offset)):
                offset += out.write(chunk)

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines this start wrote."""
        with suppress(OSError):
            end = os.fstat(self._fd).st_size
            begin = max(self._start, end - _TAIL_BYTES)
            lines = os.pread(self._fd, _TAIL_BYTES, begin).decode(errors="replace").splitlines()
            is_cut = begin > self._start and len(lines) > 1
            return tuple(lines[is_cut:][-num_lines:])
        return ()

    def close(self) -> None:
        os.close(self._fd)
