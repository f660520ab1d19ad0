"""A Hugging Face folder: config.json and safetensors files. Code in the folder is never imported."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.files import weight_files
from deltaserve.model.fingerprint import MAX_FILE_BYTES, tokenizer_hash
from deltaserve.model.folder_files import read_in_folder
from deltaserve.model.json_object import read_json, read_json_if_there
from deltaserve.model.source import TensorHeader
from deltaserve.model.stand_ins import HEAD_BYTES, stand_in
from deltaserve.model.weight_sample import Extent, weight_sample


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """A folder of safetensors files as a TensorSource."""

    format: ClassVar[str] = "safetensors"

    path: Path

    @property
    def shards(self) -> list[Path]:
        return weight_files(self.path)[0]

    @property
    def index(self) -> Mapping[str, str]:
        return weight_files(self.path)[1]

    @property
    def num_bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)

    @property
    def kinds(self) -> Mapping[str, str]:
        return {}

    def config(self) -> Fields:
        return read_json(self.path / "config.json")

    def generation(self) -> Fields | None:
        return read_json_if_there(self.path / "generation_config.json")

    def identity(self) -> Iterator[tuple[str, bytes]]:
        """config.json, every header, a little of every tensor, and the tokenizer's files."""
        config = read_in_folder(self.path / "config.json", MAX_FILE_BYTES)
        if config is not None:
            yield "config.json", config
        for shard in self.shards:
            header = _header(shard)
            yield shard.name, header
            yield f"{shard.name} values", weight_sample(shard, _extents(header))
        yield "tokenizer", tokenizer_hash(self.path).encode()

    def text_identity(self) -> Iterator[tuple[str, bytes]]:
        yield "tokenizer", tokenizer_hash(self.path).encode()

    def headers(self) -> Iterator[TensorHeader]:
        for shard in self.shards:
            with valid_file(shard), safe_open(shard, "numpy") as reader:
                for name in sorted(reader.keys()):
                    entry = reader.get_slice(name)
                    yield TensorHeader(shard.name, name, entry.get_dtype(), tuple(entry.get_shape()))


def _header(shard: Path) -> bytes:
    with shard.open("rb") as file:
        instead = stand_in(file.read(HEAD_BYTES))
        if instead is not None:
            raise ConfigError(f"{shard.name}: {instead}")
        file.seek(0)
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= num_bytes <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{shard.name}: header of {num_bytes} bytes, expected 2 .. {_MAX_HEADER_BYTES}")
        header = file.read(num_bytes)
    if len(header) < num_bytes:
        raise ConfigError(f"{shard.name}: ends within its header of {num_bytes} bytes")
    return header


def _extents(header: bytes) -> list[Extent]:
    """Where the tensors are, in the order of their names; none of a header that is damaged, which whoever reads the
    tensors says."""
    first = 8 + len(header)
    try:
        offsets = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
        return [Extent(first + int(start), int(end) - int(start)) for _, (start, end) in sorted(offsets.items())]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def open_path(path: Path) -> SafetensorsFolder:
    """Raises ConfigError for a folder whose tensors are not the weights' values."""
    folder = SafetensorsFolder(path)
    if folder.config().has("quantization_config"):
        raise ConfigError("config.json: weights that are quantised (quantization_config) are not supported")
    return folder


_MAX_HEADER_BYTES = 100_000_000
_SAYS_NOTHING = "Error while deserializing header: "


@contextmanager
def valid_file(path: Path) -> Iterator[None]:
    """Within: what reading a damaged file raises becomes a ConfigError that names it."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        found = " ".join(str(error).removeprefix(_SAYS_NOTHING).split())[:120]
        raise ConfigError(f"{path.name}: {_stand_in(path) or f'not a valid safetensors file ({found})'}") from None


def _stand_in(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return stand_in(file.read(HEAD_BYTES))
    except OSError:
        return None
