"""Which kind of checkpoint a path names."""

from pathlib import Path

from deltaserve.model.files import find_gguf
from deltaserve.model.formats.gguf_model import GgufModel
from deltaserve.model.formats.quantised_folder import QuantisedFolder
from deltaserve.model.formats.safetensors_folder import SafetensorsFolder
from deltaserve.model.formats.weight_schemes import refuse_modelopt, weight_scheme
from deltaserve.model.json_object import read_json_if_there

Source = SafetensorsFolder | QuantisedFolder | GgufModel
"""A checkpoint of any kind; all are TensorSources."""


def open_source(path: Path) -> Source:
    """A folder with safetensors, a GGUF file, or a folder with one. Raises ConfigError for anything else."""
    gguf = find_gguf(path)
    if gguf is not None:
        return GgufModel.open(gguf)
    folder = SafetensorsFolder(path)
    scheme = weight_scheme(folder.config())
    if scheme is not None:
        return QuantisedFolder(folder, scheme)
    beside = read_json_if_there(path / "hf_quant_config.json")
    if beside is not None:
        refuse_modelopt(beside)
    return folder
