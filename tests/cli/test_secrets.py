"""Key files: only the owner's, long enough, never shown."""

import os
from pathlib import Path

import pytest

from deltaserve.base.errors import ConfigError
from deltaserve.cli.secrets import read_cluster_key


def write(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "cluster.key"
    path.write_bytes(content)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1000, 1000)  # of files of root more is allowed
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_of_its_owner_is_read_without_white_space(tmp_path: Path, mode: int) -> None:
    assert read_cluster_key(write(tmp_path, b"  " + b"k" * 32 + b"\n", mode)) == b"k" * 32


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o610])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*at most 0600"):
        read_cluster_key(write(tmp_path, b"k" * 32, mode))


@pytest.mark.parametrize("content", [b"", b"\n", b"secret", b"k" * 31, b" " * 100, b"k" * 5000])
def test_short_empty_and_huge_keys_are_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"bytes, at (least|most)") as caught:
        read_cluster_key(write(tmp_path, content))
    assert "secret" not in str(caught.value)
    assert "kkk" not in str(caught.value)


def test_a_device_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match="at most 0600"):
        read_cluster_key(Path("/dev/zero"))


def test_a_pipe_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_cluster_key(tmp_path / "key")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster_key(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"Is a directory|mode"):
        read_cluster_key(tmp_path)
