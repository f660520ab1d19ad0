"""Where the logs of the processes of `serve` go."""

import tempfile
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.launch.serve import keep_logs, open_log_dir


def test_it_is_made_private(tmp_path: Path) -> None:
    made = open_log_dir(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    assert open_log_dir(made) == made
    assert not list(made.iterdir())


def test_what_is_no_folder_is_refused_with_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=r"--log-dir .*file"):
            open_log_dir(path)


def test_after_a_failure_the_logs_are_kept_and_nothing_else(tmp_path: Path) -> None:
    for name in ("front.log", "decode-0.log", "decode-0.log.1", "cluster.key", "front.json"):
        (tmp_path / name).write_text(name)
    told, _, where = keep_logs(tmp_path).rpartition(": ")
    assert told == "the logs are kept"
    kept = Path(where)
    names = {path.name for path in kept.iterdir()}
    assert names == {"front.log", "decode-0.log", "decode-0.log.1"}
    assert kept.stat().st_mode & 0o777 == 0o700
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()


def test_logs_for_which_there_is_no_place_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert keep_logs(tmp_path) == "the logs cannot be kept: No such file or directory"
