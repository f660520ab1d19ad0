"""Which kind of checkpoint a path names."""

from pathlib import Path

from deltaserve.models.files import find_gguf
from deltaserve.models.gguf_model import GgufModel
from deltaserve.models.quantised_folder import QuantisedFolder
from deltaserve.models.safetensors_folder import SafetensorsFolder
from deltaserve.models.weight_schemes import weight_scheme

Source = SafetensorsFolder | QuantisedFolder | GgufModel
"""All are TensorSources."""


def open_source(path: Path) -> Source:
    """A folder with safetensors, a GGUF file, or a folder with one. Raises ConfigError for anything else."""
    gguf = find_gguf(path)
    if gguf is not None:
        return GgufModel.open(gguf)
    folder = SafetensorsFolder(path)
    scheme = weight_scheme(folder.config())
    return folder if scheme is None else QuantisedFolder(folder, scheme)
