"""Reading what an operator named: a device may have no end, and a pipe that nobody writes to blocks for ever."""

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content. FileNotFoundError when nothing has this name, another OSError for all that cannot be read.

    A link that leads nowhere is there: leaving it out would be a silent change of what was asked for.
    """
    try:
        _check_kind(os.stat(path).st_mode)  # before it is opened: opening a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a link to nothing") from None
        raise
    except ValueError:
        raise OSError(errno.EINVAL, "a name that no file can have") from None
    with open(descriptor, "rb") as file:
        _check_kind(os.fstat(file.fileno()).st_mode)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes")
    return content


def read_if_there(path: Path, max_bytes: int) -> bytes | None:
    """What `read_regular` returns; None when nothing has this name."""
    try:
        return read_regular(path, max_bytes)
    except FileNotFoundError:
        return None


def _check_kind(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
