"""One tensor of a checkpoint's files, to be read: the seam to a format's half that needs torch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from deltaserve.compute.weights.block_matrix import Codes
from deltaserve.model.open_source import format_half
from deltaserve.model.source import TensorHeader, TensorSource


class StoredArray(Protocol):
    """A tensor, to be read before the next one is asked for. Raises ConfigError naming file and tensor."""

    @property
    def header(self) -> TensorHeader: ...

    def boxes(self, boxes: Sequence[tuple[slice, ...]]) -> Iterator[Tensor]:
        """Values of each box: leading axes, the rest is whole."""
        ...

    def codes(self, rows: slice, columns: slice) -> Iterator[Codes]:
        """Codes of what `TensorSource.kinds` names, not dequantised: some rows at a time, the first ones many whole
        panels. `columns` begin and end between runs."""
        ...


def stored_arrays(source: TensorSource) -> Iterator[StoredArray]:
    """All tensors of the files."""
    half = format_half(source, "weights")
    assert half is not None
    arrays: Iterator[StoredArray] = half.arrays(source)
    return arrays
