"""A little of every weight, so that two fine-tunes of one base model are told apart, which have all else in common."""

from collections.abc import Sequence
from os import SEEK_END
from pathlib import Path
from typing import NamedTuple

_SAMPLE_BYTES = 1024
"""Taken from the middle of a tensor: whoever trains it changes most of its values."""
_MAX_SAMPLES = 4096
"""Most of one file, evenly spread over its tensors: some 4 MiB."""


class Extent(NamedTuple):
    """Where a tensor's bytes are in its file."""

    start: int
    num_bytes: int


def weight_sample(path: Path, extents: Sequence[Extent]) -> bytes:
    """1 KiB of each tensor, of 4,096 of them at most. Raises OSError.

    An extent that is not in the file, which is damaged then, is left out: whoever reads the tensors says so.
    """
    every = -(-len(extents) // _MAX_SAMPLES) or 1
    pieces = []
    with path.open("rb", buffering=0) as file:
        end = file.seek(0, SEEK_END)
        for start, num_bytes in extents[::every]:
            if not 0 <= start <= start + num_bytes <= end:
                continue
            length = min(_SAMPLE_BYTES, num_bytes)
            file.seek(start + (num_bytes - length) // 2)
            pieces.append(file.read(length))
    return b"".join(pieces)
