"""Files that processes read when they start, held in memory as well: somebody may clear the folder meanwhile."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path


class KeptFiles:
    """Small private files of this user, and their content."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises OSError for one that is not there."""
        self._contents = {path: path.read_bytes() for path in paths}

    def restore(self) -> None:
        """Write again what is gone. Raises OSError; writes nothing into a folder that became somebody else's."""
        for path, content in self._contents.items():
            if path.exists():
                continue
            if not path.parent.exists():
                path.parent.mkdir(mode=0o700)
            if path.parent.stat().st_uid != os.geteuid():
                raise OSError(errno.EPERM, f"{path.parent} belongs to somebody else")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
            except OSError:  # a full disk: a part of it would be taken for all of it from now on
                path.unlink(missing_ok=True)
                raise
