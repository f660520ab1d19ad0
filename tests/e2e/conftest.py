"""Folders for servers: short lived, one per test. The reference model leaves the cores to the servers."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a server's logs and files."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path:
        yield Path(path)
