"""Reading a secret: from a regular file that only its owner can reach, never more than a bounded part of it."""

import os
import stat
from pathlib import Path

from deltaserve.base.errors import ConfigError

MIN_KEY_BYTES = 32
"""Of every secret: shorter ones can be guessed."""


def read_private(path: Path, where: str, max_bytes: int) -> bytes:
    """The file's content. Raises ConfigError that begins with `where` and never shows the content."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not block
        with open(descriptor, "rb") as file:
            _check_kind(os.fstat(file.fileno()).st_mode, where)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{where}: a name that no file can have") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{where}: more than {max_bytes} bytes, at most {max_bytes} are allowed")
    return content


def _check_kind(mode: int, where: str) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{where}: mode {stat.S_IMODE(mode):04o}, others can reach it; at most 0600 is allowed")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{where}: not a regular file")
