"""A GGUF file's tensors: values dequantised by the `gguf` package, or codes; rows as a Hugging Face folder has them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from deltaserve.compute.weights.block_matrix import ROWS_AT_ONCE, Codes, columns_of
from deltaserve.compute.weights.gguf_blocks import codes_of
from deltaserve.model.formats.gguf_header import GgufTensor
from deltaserve.model.formats.gguf_model import GgufModel
from deltaserve.model.source import TensorHeader

_PIECE_BYTES = 1 << 24
"""Bytes of float32 that are dequantised at a time: the package needs several times as much in passing."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GgufArray:
    """One tensor, to be read."""

    header: TensorHeader
    path: Path
    tensor: GgufTensor
    num_heads: int | None
    """Heads whose rows the file has in an order of its own; None: its rows are in ours."""

    def values(self) -> Array:
        """float32 from quantised ones and BF16, else as stored. Writable, contiguous."""
        values = _values(self.path, self.tensor)
        return values if self.num_heads is None else _halves_apart(values, self.num_heads)

    def boxes(self, boxes: Sequence[tuple[slice, ...]]) -> Iterator[Tensor]:
        whole = torch.from_numpy(self.values())
        return (whole[box] for box in boxes)

    def codes(self, rows: slice, columns: slice) -> Iterator[Codes]:
        """The same without being dequantised: of a matrix, some rows at a time, the first ones many whole panels.

        `columns` begin and end between runs.
        """
        kind, (num_rows, row_len) = self.tensor.quantisation, self.tensor.shape
        shape = (num_rows, row_len // kind.block_len, kind.block_bytes)
        raw: Array = np.memmap(self.path, np.uint8, "r", self.tensor.start, shape)
        raw = raw if self.num_heads is None else _halves_apart(raw, self.num_heads)
        raw = raw[rows]
        for start in range(0, len(raw), ROWS_AT_ONCE):
            yield columns_of(codes_of(kind.name, raw[start : start + ROWS_AT_ONCE]), columns)


def arrays(model: GgufModel) -> Iterator[GgufArray]:
    """Every tensor that a model is made of."""
    heads = model.interleaved_heads()
    tensors = [tensor for _, tensor in model.named()]
    for header, tensor in zip(model.headers(), tensors, strict=True):
        yield GgufArray(header, model.path, tensor, heads.get(tensor.name))


def _values(path: Path, tensor: GgufTensor) -> Array:
    kind = tensor.quantisation
    if kind.name in ("F32", "F16"):
        stored = np.dtype("<f4" if kind.name == "F32" else "<f2")
        return np.fromfile(path, stored, tensor.num_values, offset=tensor.start).reshape(tensor.shape)
    row_len = tensor.shape[-1]
    row_bytes = row_len // kind.block_len * kind.block_bytes
    rows = np.memmap(path, np.uint8, "r", tensor.start, (tensor.num_values // row_len, row_bytes))
    values = np.empty((len(rows), row_len), np.float32)
    step = max(1, _PIECE_BYTES // (4 * row_len))
    for start in range(0, len(rows), step):
        values[start : start + step] = dequantize(rows[start : start + step], GGMLQuantizationType[kind.name])
    return values.reshape(tensor.shape)


def _halves_apart(values: Array, num_heads: int) -> Array:
    """Rows of a head as llama files order them (channel i beside i + D/2) -> all first channels, then all second."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
