"""A folder for the specs, secrets and logs of one start; those of starts that were killed are removed by the next.

Its owner holds a lock on a file in it as long as it lives. The kernel drops the lock with the process, however that
ended, so a folder whose lock is free belongs to nobody: no process id is looked up, which another one may have now.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltaserve.base.errors import ConfigError

_PREFIX = "deltaserve-"
_LOCK = "owner"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Only the owner can look into it. Removed in the end. Raises ConfigError when there is no place for one."""
    try:
        remove_orphans(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = _lock(folder)
    except OSError as error:
        raise ConfigError(f"TMPDIR: no folder can be made for a start: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_orphans(parent: Path) -> None:
    """Remove what starts of this user left there whose process is dead. Others' folders are not touched."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_orphan(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """The descriptor that holds the lock. The file gets its name when it is locked: nobody finds it free before."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return descriptor


def _is_orphan(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or without a lock: not made here
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
