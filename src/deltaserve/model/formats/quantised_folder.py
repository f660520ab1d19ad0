"""A Hugging Face folder with quantised weights, as if they were not; and which products can take as they are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from deltaserve.model.files import weight_files
from deltaserve.model.formats.quantised_schemes import (
    StoredWeight,
    WeightScheme,
    refuse_modelopt,
    stored_weights,
    weight_scheme,
)
from deltaserve.model.formats.safetensors_folder import SafetensorsFolder
from deltaserve.model.json_object import read_json_if_there
from deltaserve.model.source import TensorHeader


@dataclass(frozen=True, slots=True)
class QuantisedFolder(SafetensorsFolder):
    """A folder with quantised weights as a TensorSource."""

    format: ClassVar[str] = "quantised"

    scheme: WeightScheme

    @property
    def index(self) -> Mapping[str, str]:
        return {self.scheme.name_of(name): file for name, file in weight_files(self.path)[1].items()}

    @property
    def kinds(self) -> Mapping[str, str]:
        kinds = ((weight.header.name, self.scheme.kind(weight)) for weight in self.weights())
        return {name: kind for name, kind in kinds if kind is not None}

    def headers(self) -> Iterator[TensorHeader]:
        return (weight.header for weight in self.weights())

    def weights(self) -> Iterator[StoredWeight]:
        return stored_weights(list(SafetensorsFolder.headers(self)), self.scheme)


def open_path(path: Path) -> QuantisedFolder | None:
    """None for a folder whose config.json says nothing of it. Raises ConfigError for a scheme that is not read."""
    scheme = weight_scheme(SafetensorsFolder(path).config())
    if scheme is not None:
        return QuantisedFolder(path, scheme)
    beside = read_json_if_there(path / "hf_quant_config.json")
    if beside is not None:
        refuse_modelopt(beside)
    return None
