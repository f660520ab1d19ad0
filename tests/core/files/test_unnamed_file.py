"""A file without a name has its space at once, and leaves nothing behind; what cannot be had is told in a line."""

import os
import shutil
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.unnamed_file import open_unnamed


def test_it_has_its_space_and_no_name(tmp_path: Path) -> None:
    with open_unnamed(tmp_path, 5000, "--flag") as file:
        assert os.fstat(file.fileno()).st_size == 5000
        assert not list(tmp_path.iterdir())


def test_what_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--flag .*/no: No such file"):
        open_unnamed(tmp_path / "no", 1, "--flag")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--flag .*/file: Not a directory"):
        open_unnamed(tmp_path / "file", 1, "--flag")
    with pytest.raises(ConfigError, match=r"--flag .*: \d+ MiB: no space for it"):
        open_unnamed(tmp_path, shutil.disk_usage(tmp_path).free + (1 << 30), "--flag")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
