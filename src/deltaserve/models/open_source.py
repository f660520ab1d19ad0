"""Which kind of checkpoint a path names."""

from pathlib import Path

from deltaserve.models.files import find_gguf
from deltaserve.models.gguf_model import GgufModel
from deltaserve.models.safetensors_folder import SafetensorsFolder

Source = SafetensorsFolder | GgufModel
"""Both are TensorSources."""


def open_source(path: Path) -> Source:
    """A folder with safetensors, a GGUF file, or a folder with one. Raises ConfigError for anything else."""
    gguf = find_gguf(path)
    return SafetensorsFolder(path) if gguf is None else GgufModel.open(gguf)
