"""What a checkpoint must tell, whatever the format of its files. No torch: the launcher and the front ask, too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from deltaserve.model.fields import Fields


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file, not read."""

    file: str
    name: str
    """Name as in a Hugging Face folder of the same family."""
    dtype: str
    """Type of its values once read, in the words of safetensors."""
    shape: tuple[int, ...]


class TensorSource(Protocol):
    """A checkpoint on disk. Raises ConfigError naming file and field."""

    format: ClassVar[str]
    """Name in FORMATS of core/branches.py."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files."""
        ...

    @property
    def index(self) -> Mapping[str, str]:
        """Tensor |-> file that must hold it; empty where nothing says so."""
        ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """Tensor |-> how it is stored (a key of STORED_FORMS), of those that products can take as they are stored."""
        ...

    def config(self) -> Fields:
        """Fields of config.json, or what stands for them."""
        ...

    def generation(self) -> Fields | None:
        """The fields of generation_config.json, where there is one."""
        ...

    def identity(self) -> Iterable[tuple[str, bytes]]:
        """Named bytes that tell it from other checkpoints: of everything, and of the weights a little of each."""
        ...

    def text_identity(self) -> Iterable[tuple[str, bytes]]:
        """Named bytes that tell its tokenizer and chat template from others."""
        ...

    def headers(self) -> Iterable[TensorHeader]:
        """The header of every tensor, in the order in which they are read."""
        ...
