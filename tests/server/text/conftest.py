"""The text side of a model, and its codec."""

from pathlib import Path

import pytest

from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.text_folder import write_text_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text side of a model."""
    return write_text_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    """The folder's codec."""
    return TextCodec.load(model_folder)
