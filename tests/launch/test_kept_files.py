"""What processes read at their start comes back when it was removed, and only to its owner."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.launch.kept_files import KeptFiles


def write(folder: Path) -> list[Path]:
    folder.mkdir(mode=0o700)
    paths = [folder / name for name in ("decode-0.json", "cluster.key")]
    for path in paths:
        path.write_text(path.name)
    return paths


def test_a_removed_folder_comes_back_private(tmp_path: Path) -> None:
    paths = write(tmp_path / "run")
    files = KeptFiles(paths)
    shutil.rmtree(tmp_path / "run")
    files.restore()
    assert [path.read_text() for path in paths] == ["decode-0.json", "cluster.key"]
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "run", *paths)] == [0o700, 0o600, 0o600]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    first, second = write(tmp_path / "run")
    files = KeptFiles([first, second])
    first.write_text("edited")
    second.unlink()
    files.restore()
    assert (first.read_text(), second.read_text()) == ("edited", "cluster.key")


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    first, _ = paths = write(tmp_path / "run")
    files = KeptFiles(paths)
    first.unlink()
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        files.restore()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_nothing_is_written_into_a_folder_of_somebody_else(tmp_path: Path) -> None:
    paths = write(tmp_path / "run")
    files = KeptFiles(paths)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 1000, 1000)
    with pytest.raises(PermissionError, match="somebody else"):
        files.restore()
    assert not list((tmp_path / "run").iterdir())


def test_a_file_that_could_be_written_in_part_only_is_removed(tmp_path: Path) -> None:
    """Else the next start would take the part for the whole."""
    first, second = write(tmp_path / "run")
    second.write_bytes(b"x" * 8192)
    program = f"""
import resource, signal
from pathlib import Path
from deltaserve.launch.kept_files import KeptFiles
path = Path({str(second)!r})
files = KeptFiles([path])
path.unlink()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
files.restore()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert b"File too large" in ended.stderr
    assert first.exists() and not second.exists()
