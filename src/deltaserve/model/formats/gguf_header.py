"""The header of a GGUF file: metadata, and where each tensor lies. No weight is read.

The reader of the `gguf` package makes array objects of every part of every field (a vocabulary of 49,152 tokens takes
3.9 s and 150 MB, in each process that asks; here 0.1 s), and follows any length that a damaged file names. Here each
length is held against the file first. What the package knows of the format stands below as tables; a test compares.
"""

import mmap
import os
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.model.stand_ins import HEAD_BYTES, stand_in

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_KEY_LEN = 1 << 16
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type |-> its `struct` letter; little endian."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How one type of tensor is stored."""

    name: str
    block_len: int
    """Values in one block."""
    block_bytes: int


QUANTISATIONS: Mapping[int, Quantisation] = {
    0: Quantisation("F32", 1, 4),
    1: Quantisation("F16", 1, 2),
    2: Quantisation("Q4_0", 32, 18),
    3: Quantisation("Q4_1", 32, 20),
    6: Quantisation("Q5_0", 32, 22),
    7: Quantisation("Q5_1", 32, 24),
    8: Quantisation("Q8_0", 32, 34),
    10: Quantisation("Q2_K", 256, 84),
    11: Quantisation("Q3_K", 256, 110),
    12: Quantisation("Q4_K", 256, 144),
    13: Quantisation("Q5_K", 256, 176),
    14: Quantisation("Q6_K", 256, 210),
    30: Quantisation("BF16", 1, 2),
}
"""Number of a tensor type |-> what is read. The others are refused by name."""
REFUSED: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as everywhere here; the file has them the other way round."""
    quantisation: Quantisation
    start: int
    """Where its bytes begin in the file."""

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values // self.quantisation.block_len * self.quantisation.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself."""

    file: str
    """Name of the file without folder: leads every message."""
    metadata: Mapping[str, Any]
    """Numbers, flags, strings, and lists of one of these."""
    tensors: tuple[GgufTensor, ...]
    raw: bytes
    """All bytes before the first tensor."""


def read_header(path: Path) -> GgufHeader:
    """Raises ConfigError naming the file for one that is damaged, cut, or of a kind that is not read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name}: {getattr(error, 'strerror', None) or error}") from None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path.name}: not a regular file")
        head = file.read(HEAD_BYTES)
        if not head.startswith(MAGIC):
            raise ConfigError(f"{path.name}: {stand_in(head) or 'not a GGUF file'}")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path.name, data).header()


class _Walk:
    """Goes through the header once, from front to back. Nothing is taken beyond the end of the file."""

    def __init__(self, file: str, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._at = len(MAGIC)
        self._end = min(len(data), _MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise self._error(f"{kind} of the format is not read; versions 2 and 3 are, in little endian")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("metadata keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", _MAX_KEY_LEN)
            if key in metadata:
                raise self._error(f"metadata key {key[:80]!r} is given twice")
            metadata[key] = self._value(key, self._number("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        tensors = self._placed(entries, self._alignment(metadata))
        twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
        if twice:
            raise self._error(f"tensor {twice[0][:80]!r} is given twice")
        return GgufHeader(self._file, metadata, tensors, self._data[: self._at])

    # ---------------------------------------------------------------- metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key, self._end)
        if kind == _ARRAY:
            return self._array(key, self._number("I"), self._number("Q"))
        return self._number(self._letter(key, kind))

    def _array(self, key: str, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            self._check_room(key, 8 * count)
            return [self._string(key, self._end) for _ in range(count)]
        letter = self._letter(key, kind)
        num_bytes = count * struct.calcsize("<" + letter)
        at = self._skip(key, num_bytes)
        return list(struct.unpack_from(f"<{count}{letter}", self._data, at))

    def _letter(self, key: str, kind: int) -> str:
        letter = _SCALARS.get(kind)
        if letter is None:
            raise self._error(f"metadata {key[:80]!r} has type {kind}, which is none")
        return letter

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self._error(f"general.alignment is {str(value)[:40]}, expected a power of two")
        return value

    # ---------------------------------------------------------------- tensors

    def _tensor(self) -> GgufTensor:
        """The next tensor entry; its `start` is still counted from the end of the header."""
        name = self._string("a tensor's name", _MAX_KEY_LEN)
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name[:80]!r} has {num_dimensions} dimensions, expected 1 .. {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        kind, start = self._number("I"), self._number("Q")
        quantisation = QUANTISATIONS.get(kind)
        if quantisation is None:
            read = ", ".join(known.name for known in QUANTISATIONS.values())
            found = REFUSED.get(kind, f"number {kind}")
            raise self._error(f"tensor {name[:80]!r} has type {found}, which is not read; read are {read}")
        if 0 in shape or shape[-1] % quantisation.block_len:
            rows = f"{quantisation.name} stores rows in blocks of {quantisation.block_len}"
            raise self._error(f"tensor {name[:80]!r} has shape {list(shape)}, but {rows}")
        return GgufTensor(name, shape, quantisation, start)

    def _placed(self, entries: list[GgufTensor], alignment: int) -> tuple[GgufTensor, ...]:
        """The tensors with `start` in the file. They follow each other in the header's order, padded to the alignment.

        llama.cpp asks for the same. Any other offset would read the values of another tensor, and no name would tell.
        """
        data_start, size = self._at + -self._at % alignment, len(self._data)
        placed, expected = [], 0
        for entry in entries:
            which = f"tensor {entry.name[:80]!r} of shape {list(entry.shape)}"
            tensor = replace(entry, start=data_start + entry.start)
            end = tensor.start + tensor.num_bytes
            if end > size:
                raise self._error(f"{which} ends at byte {end} of a file of {size}: cut off, or damaged")
            if entry.start != expected:
                found = f"has offset {entry.start}, but {expected} follows in steps of {alignment}"
                raise self._error(f"{which} {found}: damaged")
            placed.append(tensor)
            expected += tensor.num_bytes + -tensor.num_bytes % alignment
        return tuple(placed)

    # ---------------------------------------------------------------- bytes

    def _number(self, letter: str) -> Any:
        at = self._skip("a number", struct.calcsize("<" + letter))
        return struct.unpack_from("<" + letter, self._data, at)[0]

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q"))
        if count > most:
            raise self._error(f"{count} {what}, at most {most} are read")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise self._error(f"{what[:80]} has {length} bytes, at most {most} are read")
        at = self._skip(what, length)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError:
            raise self._error(f"{what[:80]} is no UTF-8") from None

    def _skip(self, what: str, num_bytes: int) -> int:
        """Where the next `num_bytes` begin; the walk goes on behind them."""
        self._check_room(what, num_bytes)
        at = self._at
        self._at += num_bytes
        return at

    def _check_room(self, what: str, num_bytes: int) -> None:
        if num_bytes > self._end - self._at:
            raise self._error(f"ends within {what[:80]}, which needs {num_bytes} bytes more: cut off, or damaged")

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._file}: {text}")
