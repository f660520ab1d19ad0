"""What the machine did not give while a process started: one line in place of a stack. Starting it again at once would
not help."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from deltaserve.core.errors import ConfigError, one_line

_MEMORY = (
    "there is no more memory, or no more addresses (ulimit -v, the limit of the container): lower --num-pages or "
    "--mem-fraction-static, or take fewer workers or a smaller model"
)
_THREADS = "no more threads may be started: raise what this user may have (ulimit -u), or the container (pids)"
_FILES = "no more files may be open: raise what a process may have (ulimit -n)"
_OF_SYSTEM = {
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
    errno.EFBIG: "no file may be so large (ulimit -f), as the pages that a peer reads: raise it, or lower --num-pages",
    errno.EMFILE: _FILES,
    errno.ENFILE: "no more files may be open: raise what the machine may have (sysctl fs.file-max)",
    errno.ENOSPC: "a disk is full: free some of it, or choose another folder (--state-dir, --log-dir, TMPDIR)",
}
_OF_LIBRARIES = {
    "can't start new thread": _THREADS,
    "annot allocate memory": _MEMORY,
    "an't allocate memory": _MEMORY,
    "out of memory": _MEMORY,
    "Too many open files": _FILES,
    "Authenticator thread failed to start": _FILES,
}
"""What messages of libraries have in them. Those of ZeroMQ are no OSError; its authenticator's thread lacks files for
its loop."""


@contextmanager
def telling_shortage() -> Iterator[None]:
    """Raises ConfigError in place of an error that says that there is not enough of something."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        lacks = _lack_in(error)
        if lacks is None:
            raise
        raise ConfigError(f"{lacks} ({one_line(error) or 'MemoryError'})") from error


def _lack_in(error: Exception) -> str | None:
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
        return _OF_SYSTEM[error.errno]
    text = str(error)
    return next((lack for words, lack in _OF_LIBRARIES.items() if words in text), None)
