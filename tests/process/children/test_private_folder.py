"""A start's own folder: gone when it ends, and gone after the next start when it was killed."""

import errno
import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.process.children.private_folder import private_folder, remove_orphans
from tests.descriptors import num_open_files

KILLED = """
import os, signal
from deltaserve.process.children.private_folder import private_folder
with private_folder() as folder:
    (folder / "cluster.key").write_text("secret")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_goes_with_its_owner() -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "front.json").write_text("{}")
    assert not folder.exists()


def test_the_folder_of_a_killed_start_is_removed_by_the_next(own_tmp: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(own_tmp)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [file.name for file in own_tmp.glob("deltaserve-*/cluster.key")] == ["cluster.key"]
    with private_folder() as folder:
        assert list(own_tmp.iterdir()) == [folder]


def test_the_folder_of_a_living_start_and_folders_of_others_stay(own_tmp: Path) -> None:
    foreign = own_tmp / "deltaserve-notes"
    foreign.mkdir(mode=0o700)
    (foreign / "todo").touch()
    open_to_all = own_tmp / "deltaserve-shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (open_to_all / "locked-by-owner").touch()
    (own_tmp / "deltaserve-link").symlink_to(foreign)
    with private_folder() as first, private_folder() as second:
        remove_orphans(own_tmp)
        assert first.exists()
        assert second.exists()
    assert sorted(path.name for path in own_tmp.iterdir()) == [
        "deltaserve-link",
        "deltaserve-notes",
        "deltaserve-shared",
    ]


def test_without_a_place_for_it_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nothing/here")
    with pytest.raises(ConfigError, match="TMPDIR: no folder can be made"), private_folder():
        pytest.fail("nobody gets here")


def test_a_machine_without_a_temporary_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nothing/here"])
    with pytest.raises(ConfigError, match="No usable temporary directory"), private_folder():
        pytest.fail("nobody gets here")


def test_it_can_be_elsewhere(tmp_path: Path) -> None:
    state = tmp_path / "state" / "deltaserve"
    with private_folder(str(state)) as folder:
        assert folder.parent == state
    (tmp_path / "file").touch()
    no_folder = pytest.raises(ConfigError, match=r"--state-dir .*file: no folder can be made")
    with no_folder, private_folder(str(tmp_path / "file")):
        pytest.fail("nobody gets here")


def test_the_lock_is_on_the_folder_itself() -> None:
    """That is what systemd-tmpfiles looks for before it removes old files from a folder."""
    with private_folder() as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(descriptor)


@pytest.mark.parametrize("order", ["first", "last"])
def test_the_mark_is_removed_last(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is cut short leaves what the next start finds, secrets among it."""
    removed: list[str] = []
    unlink = os.unlink

    def note(path: str | Path, *, dir_fd: int | None = None) -> None:
        removed.append(Path(path).name)
        unlink(path, dir_fd=dir_fd)

    with private_folder() as folder:
        (folder / "cluster.key").write_text("secret")
        for number in range(40):
            (folder / f"{number}.json").touch()
        (folder / "below").mkdir()
        (folder / "below" / "front.log").touch()
        if order == "last":
            (folder / "locked-by-owner").rename(folder / "x")
            (folder / "x").rename(folder / "locked-by-owner")
        monkeypatch.setattr(os, "unlink", note)
    assert not folder.exists()
    assert {"cluster.key", "front.log"} < set(removed[:-1])
    assert removed[-1] == "locked-by-owner"


def test_a_folder_that_cannot_be_marked_is_not_left(own_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, mode: int = 0o666, exist_ok: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", fail)
    gc.collect()  # of tests before: it may close descriptors at any moment
    num_open = num_open_files()
    with pytest.raises(ConfigError, match="No space left on device"), private_folder():
        pytest.fail("nobody gets here")
    assert list(own_tmp.iterdir()) == []
    assert num_open_files() == num_open
