"""A file without a name, and all of its space: whatever ends the process gives it back, and nobody else can open it."""

import errno
import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from deltaserve.core.errors import ConfigError

_TOO_LARGE = {errno.ENOSPC: "no space for it", errno.EFBIG: "the file system allows no file of that size"}


def open_unnamed(folder: Path, num_bytes: int, flag: str) -> BinaryIO:
    """An empty file on the disk of `folder`, which `flag` has asked for. Raises ConfigError."""
    where = f"{flag} {str(folder)[:200]}"
    try:
        file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 whoever asked closes it
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        file.close()
        reason = _TOO_LARGE.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f"{where}: {-(-num_bytes >> 20)} MiB: {reason}") from None
    return file
