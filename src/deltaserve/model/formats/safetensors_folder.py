"""A Hugging Face folder: config.json and safetensors files. Code in the folder is never imported."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.files import weight_files
from deltaserve.model.json_object import read_json, read_json_if_there
from deltaserve.model.source import TensorHeader
from deltaserve.model.stand_ins import HEAD_BYTES, stand_in


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """A folder of safetensors files as a TensorSource."""

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

    def headers(self) -> Iterator[TensorHeader]:
        for shard in self.shards:
            with valid_file(shard), safe_open(shard, "numpy") as reader:
                for name in sorted(reader.keys()):
                    entry = reader.get_slice(name)
                    yield TensorHeader(shard.name, name, entry.get_dtype(), tuple(entry.get_shape()))


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
