"""A folder's tensors: of each only what is asked for is read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from deltaserve.compute.weights.block_matrix import Codes
from deltaserve.model.formats.safetensors_folder import SafetensorsFolder, valid_file
from deltaserve.model.source import TensorHeader


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor, to be read while its file is open."""

    header: TensorHeader
    path: Path
    reader: Any
    """A safetensors file."""

    def boxes(self, boxes: Sequence[tuple[slice, ...]]) -> Iterator[Tensor]:
        for box in boxes:
            with valid_file(self.path):
                name = self.header.name
                values: Tensor = self.reader.get_slice(name)[box] if box else self.reader.get_tensor(name)
            yield values

    def codes(self, rows: slice, columns: slice) -> Iterator[Codes]:
        """None: these files hold values."""
        return iter(())


def arrays(source: SafetensorsFolder) -> Iterator[FileTensor]:
    """Every tensor of the folder."""
    for path in source.shards:
        with valid_file(path), safe_open(path, "pt") as reader:
            for name in sorted(reader.keys()):
                entry = reader.get_slice(name)
                yield FileTensor(
                    TensorHeader(path.name, name, entry.get_dtype(), tuple(entry.get_shape())), path, reader
                )
