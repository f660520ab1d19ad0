"""Folders for servers: short lived, one per test; and a server for whoever needs nothing special and leaves it whole.

The reference model leaves the cores to the servers.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.e2e.server import SHARED_PAGES, Server, serving

torch.set_num_threads(1)

_SHARED_FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "16", "--attention-split-tokens", "16"),
    *("--num-pages", str(SHARED_PAGES)),
)
"""Small chunks: requests pass through every state for a while."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a server's logs and files."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="session")
def shared_pair(tiny_models: Path) -> Iterator[Server]:
    """A server of the tiny llama, apart in prefill and decode. No test may end or stop a process of it."""
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path,
        serving(Path(path), tiny_models / "llama", *_SHARED_FLAGS) as server,
    ):
        yield server
