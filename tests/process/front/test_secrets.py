"""Key files: only the owner's, long enough, never shown."""

import os
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Namespace
from deltaserve.process.front.secrets import read_api_keys, read_cluster_key
from deltaserve.server.settings import ApiKey, Right

USER = ApiKey("u" * 40, Namespace("acme"))
ADMIN = ApiKey("a" * 40, Namespace("ops"), frozenset(Right))


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


def _key_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_is_read(tmp_path: Path) -> None:
    text = f"# tenants\n{USER.secret} acme\n\n{ADMIN.secret} ops admin\n"
    assert read_api_keys(_key_file(tmp_path, text)) == (USER, ADMIN)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read_api_keys(_key_file(tmp_path, f"\ufeff{USER.secret} acme\r\n")) == (USER,)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "holds no key"),
        (f"{USER.secret} acme", 0o660, "mode 0660"),
        (f"{USER.secret} acme", 0o604, "mode 0604"),
        (USER.secret, 0o600, "SECRET NAMESPACE"),
        (f"{USER.secret} acme root", 0o600, "SECRET NAMESPACE"),
        ("short acme", 0o600, "5 bytes"),
        (f"{USER.secret} ac:me", 0o600, "namespace"),
        (f"{USER.secret}\0 acme", 0o600, ":1: the key holds a character that cannot be printed"),
        (f"{USER.secret}\x1b[31m acme", 0o600, "cannot be printed"),
        (f"{USER.secret}\ufeff acme", 0o600, "cannot be printed"),
        (f"{USER.secret} acme\x0b{ADMIN.secret} ops", 0o600, "SECRET NAMESPACE"),
        (f"{USER.secret} acme\n\n{USER.secret} other", 0o600, ":3: this key stands in an earlier line"),
    ],
)
def test_a_bad_key_file_is_refused_without_telling_a_key(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_api_keys(_key_file(tmp_path, text, mode))
    assert message in str(caught.value)
    assert USER.secret not in str(caught.value)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        read_api_keys(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="a name that no file can have"):
        read_api_keys(Path("a\0b"))
