"""Rows of a GGUF file's quantised tensors as codes with scales (block_forms.py), every value exactly.

How the bits of a block lie is that of ggml; a test compares each type with the `gguf` package.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltaserve.compute.weights.block_matrix import Codes

Array = npt.NDArray[Any]
_Split = Callable[[Array], tuple[Array, Array, Array | None]]
"""Blocks [n, bytes] -> codes [n, values], scales [n, runs], offsets [n, runs]."""


def codes_of(kind: str, rows: Array) -> Codes:
    """`kind`: a key of TYPE_FORMS; rows [rows, blocks, bytes of a block] uint8"""
    count = len(rows)
    codes, scales, offsets = _SPLITS[kind](np.ascontiguousarray(rows).reshape(-1, rows.shape[2]))
    some = None if offsets is None else torch.from_numpy(offsets.reshape(count, -1))
    return Codes(torch.from_numpy(codes.reshape(count, -1)), torch.from_numpy(scales.reshape(count, -1)), some)


def _half(data: Array, start: int) -> Array:
    """The float16 number that begins at byte `start`: [blocks, 1]."""
    return data[:, start : start + 2].copy().view(np.float16)


def _low_then_high(data: Array) -> Array:
    """Halves of bytes: all low ones, then all high ones."""
    return np.concatenate((data & 15, data >> 4), -1)


def _fifth_bits(data: Array) -> Array:
    """32 bits -> the fifth bit of 32 codes."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def _q8_0(data: Array) -> tuple[Array, Array, Array | None]:
    return data[:, 2:] ^ 128, _half(data, 0), None


def _q4_0(data: Array) -> tuple[Array, Array, Array | None]:
    return _low_then_high(data[:, 2:]), _half(data, 0), None


def _q4_1(data: Array) -> tuple[Array, Array, Array | None]:
    return _low_then_high(data[:, 4:]), _half(data, 0), _half(data, 2)


def _q5_0(data: Array) -> tuple[Array, Array, Array | None]:
    return _low_then_high(data[:, 6:]) | _fifth_bits(data[:, 2:6]), _half(data, 0), None


def _q5_1(data: Array) -> tuple[Array, Array, Array | None]:
    return _low_then_high(data[:, 8:]) | _fifth_bits(data[:, 4:8]), _half(data, 0), _half(data, 2)


def _quarters(data: Array) -> Array:
    """[n, 64] bytes -> [n, 256]: of each 32 bytes first the lowest two bits of all, then the next."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters: Array = data.reshape(-1, 2, 1, 32) >> shifts & 3
    return quarters.reshape(-1, 256)


def _q2_k(data: Array) -> tuple[Array, Array, Array | None]:
    scales, d, least = data[:, :16], _half(data, 80).astype(np.float32), _half(data, 82).astype(np.float32)
    return _quarters(data[:, 16:80]), d * (scales & 15), -least * (scales >> 4)


def _q3_k(data: Array) -> tuple[Array, Array, Array | None]:
    high, low, packed = data[:, :32], data[:, 32:96], data[:, 96:108]
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    third = (high.reshape(-1, 1, 32) >> shifts & 1).reshape(-1, 256) << 2
    low_bits = _low_then_high(packed[:, :8])
    high_bits = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low_bits | high_bits << 4).astype(np.int32) - 32
    return _quarters(low) | third, _half(data, 108).astype(np.float32) * scales.astype(np.float32), None


def _scales_of_6_bits(packed: Array) -> tuple[Array, Array]:
    """[n, 12] -> 8 scales and 8 offsets of each block"""
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, high & 15 | first >> 6 << 4), 1)
    return scales, np.concatenate((second & 63, high >> 4 | second >> 6 << 4), 1)


def _scaled_k(data: Array) -> tuple[Array, Array]:
    """Scales and offsets of Q4_K and Q5_K."""
    scales, offsets = _scales_of_6_bits(data[:, 4:16])
    return _half(data, 0).astype(np.float32) * scales, -_half(data, 2).astype(np.float32) * offsets


def _halves_by_32(data: Array) -> Array:
    """[n, 128] bytes -> [n, 256]: of each 32 bytes the low halves, then the high ones."""
    return _low_then_high(data.reshape(-1, 4, 32)).reshape(-1, 256)


def _q4_k(data: Array) -> tuple[Array, Array, Array | None]:
    return _halves_by_32(data[:, 16:]), *_scaled_k(data)


def _q5_k(data: Array) -> tuple[Array, Array, Array | None]:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (data[:, 16:48].reshape(-1, 1, 32) >> shifts & 1).reshape(-1, 256) << 4
    return _halves_by_32(data[:, 48:]) | fifth, *_scaled_k(data)


def _q6_k(data: Array) -> tuple[Array, Array, Array | None]:
    low = _low_then_high(data[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (data[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256) << 4
    scales = data[:, 192:208].copy().view(np.int8).astype(np.float32)
    return low | high, _half(data, 208).astype(np.float32) * scales, None


_SPLITS: Mapping[str, _Split] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
