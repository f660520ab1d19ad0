"""A folder for the specs, secrets and logs of one start; those of starts that were killed are removed by the next.

Its owner holds a lock on it as long as it lives. The kernel drops the lock with the process, however that ended, so a
marked folder whose lock is free belongs to nobody: no process id is looked up, which another one may have now. What
clears away old files in /tmp (systemd-tmpfiles) leaves a locked folder alone with all that is in it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltaserve.core.errors import ConfigError

_PREFIX = "deltaserve-"
_MARK = "locked-by-owner"
"""A file that says what the lock means. Made when the folder is locked: nobody finds it free before."""


@contextmanager
def private_folder(state_dir: str | None = None) -> Iterator[Path]:
    """A folder that only its owner can look into. In `state_dir`, by default where temporary files go. Removed in the
    end.

    Raises ConfigError when there is no place for one.
    """
    where = "TMPDIR" if state_dir is None else f"--state-dir {state_dir}"
    try:
        parent = Path(tempfile.gettempdir() if state_dir is None else state_dir)
        if state_dir is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_orphans(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _locked(folder)
    except OSError as error:
        raise ConfigError(f"{where}: no folder can be made for a start ({error.strerror or error})") from None
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def remove_orphans(parent: Path) -> None:
    """Remove what starts of this user left there whose process is dead. Others' folders are not touched."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_orphan(folder):
            _remove(folder)


def _locked(folder: Path) -> int:
    """A descriptor that holds the lock on the new folder, which is marked now. Raises OSError; then there is none."""
    lock: int | None = None
    try:
        lock = _open_folder(folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / _MARK).touch(mode=0o600)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        raise
    return lock


def _remove(folder: Path) -> None:
    """The mark last: what is left when this is cut short, secrets perhaps, is found by the next start."""
    with suppress(OSError):
        for path in [path for path in folder.iterdir() if path.name != _MARK]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_orphan(folder: Path) -> bool:
    try:
        descriptor = _open_folder(folder)
    except OSError:  # gone meanwhile, or no folder
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not (folder / _MARK).exists():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
