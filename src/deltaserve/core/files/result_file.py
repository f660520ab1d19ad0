"""Files that a long run leaves: their place is looked at before it begins, and a disk that is full ends nobody."""

import os
from pathlib import Path

from deltaserve.core.errors import ConfigError


def check_place(path: Path, flag: str) -> None:
    """Raises ConfigError where no file can be written."""
    where, folder = f"{flag} {str(path)[:200]}", path.parent
    if path.is_dir():
        raise ConfigError(f"{where}: a folder")
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no folder {str(folder)[:200]}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{where}: it may not be written")


def write_result(path: Path, flag: str, text: str) -> str | None:
    """Write the file; what went wrong, in a line, or None."""
    try:
        path.write_text(text)
    except OSError as error:
        return f"{flag} {str(path)[:200]}: {error.strerror or error}"
    return None
