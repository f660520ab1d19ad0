"""What an operator names is read only if it has an end and somebody has written it."""

import os
from pathlib import Path

import pytest

from deltaserve.core.files.regular_file import read_if_there, read_regular


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(path, 4)


def test_only_what_has_no_name_at_all_is_not_there(tmp_path: Path) -> None:
    assert read_if_there(tmp_path / "nothing", 1) is None
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="a link to nothing"):
        read_if_there(link, 1)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(path, 1)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 1)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a name that no file can have"):
        read_regular(tmp_path / "a\0b", 1)
