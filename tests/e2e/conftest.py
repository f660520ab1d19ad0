"""Folders for servers: short lived, one per test."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a server's logs and files."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path:
        yield Path(path)
