"""The values of a GGUF file's tensors: dequantised by the `gguf` package, rows ordered as in a Hugging Face folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from deltaserve.models.gguf_header import GgufTensor
from deltaserve.models.gguf_model import GgufModel
from deltaserve.models.source import TensorHeader

_PIECE_BYTES = 1 << 24
"""Of float32, dequantised at a time: the package needs several times as much in passing."""

Array = npt.NDArray[Any]


def gguf_arrays(model: GgufModel) -> Iterator[tuple[TensorHeader, Callable[[], Array]]]:
    """Each tensor, and how to read it: float32 from quantised ones and BF16, else as stored. Writable, contiguous."""
    heads = model.interleaved_heads()
    tensors = [tensor for _, tensor in model.named()]
    for header, tensor in zip(model.headers(), tensors, strict=True):

        def read(tensor: GgufTensor = tensor, num_heads: int | None = heads.get(tensor.name)) -> Array:
            values = _values(model.path, tensor)
            return values if num_heads is None else _halves_apart(values, num_heads)

        yield header, read


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
