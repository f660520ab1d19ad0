"""A quantised folder's weights, one at a time: values, computed on the CPU, or codes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from deltaserve.compute.weights.block_matrix import ROWS_AT_ONCE, Codes, columns_of
from deltaserve.model.formats.block_forms import WHOLE_LEN
from deltaserve.model.formats.quantised_folder import QuantisedFolder
from deltaserve.model.formats.quantised_schemes import (
    Fp8Blocks,
    Mxfp4Experts,
    PackedInts,
    ScaledRows,
    StoredWeight,
    WeightScheme,
)
from deltaserve.model.formats.safetensors_folder import valid_file
from deltaserve.model.source import TensorHeader


class _Files:
    """Tensors of all files: a weight's parts may lie in several."""

    def __init__(self, source: QuantisedFolder, stack: ExitStack) -> None:
        self._path = source.path
        self._opened: dict[str, Any] = {}
        for shard in source.shards:
            with valid_file(shard):
                self._opened[shard.name] = stack.enter_context(safe_open(shard, "pt"))

    def read(self, weight: StoredWeight) -> list[Tensor]:
        parts = []
        for part in weight.parts:
            with valid_file(self._path / part.file):
                parts.append(self._opened[part.file].get_tensor(part.name))
        return parts


@dataclass(frozen=True, slots=True)
class FolderWeight:
    """One weight, to be read while the files are open."""

    stored: StoredWeight
    scheme: WeightScheme
    files: _Files

    @property
    def header(self) -> TensorHeader:
        return self.stored.header

    def values(self) -> Tensor:
        """See `dequantise` for what is quantised, else as stored."""
        parts = self.files.read(self.stored)
        return parts[0] if len(parts) == 1 else dequantise(parts[0], parts[1], self.scheme)

    def boxes(self, boxes: Sequence[tuple[slice, ...]]) -> Iterator[Tensor]:
        whole = self.values()
        return (whole[box] for box in boxes)

    def codes(self, rows: slice, columns: slice) -> Iterator[Codes]:
        """Codes of a weight whose scheme has a kind for it: some rows at a time, the first ones many whole panels."""
        values, scales = self.files.read(self.stored)
        num_rows, cols = self.header.shape
        codes = _codes(values, self.scheme)
        factors = scales.float().reshape(-1, 1) if isinstance(self.scheme, ScaledRows) else scales.float()
        if len(factors) == 1:
            factors = factors.expand(num_rows, -1)
        runs = factors.repeat_interleave(cols // WHOLE_LEN // factors.shape[1], 1)
        for start in range(0, len(codes[rows]), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            yield columns_of(Codes(codes[rows][part], runs[rows][part], None), columns)


def arrays(source: QuantisedFolder) -> Iterator[FolderWeight]:
    """Each weight; to be read before the next is asked for."""
    with ExitStack() as stack:
        files = _Files(source, stack)
        for weight in source.weights():
            yield FolderWeight(weight, source.scheme, files)


def _codes(values: Tensor, scheme: WeightScheme) -> Tensor:
    """[rows, cols] uint8, half of their range for 0"""
    if isinstance(scheme, PackedInts):
        shifts = torch.arange(0, 32, scheme.bits, dtype=torch.int32)
        codes: Tensor = (values[..., None] >> shifts) & (2**scheme.bits - 1)
        return codes.flatten(1).to(torch.uint8)
    return values.view(torch.uint8) ^ 128


_FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""What each code of 4 bits stands for."""
_EXPONENT_BIAS = 127


def dequantise(values: Tensor, scales: Tensor, scheme: WeightScheme) -> Tensor:
    """The two parts of a weight -> [rows, cols] float32, or of experts [E, in, out] bfloat16"""
    match scheme:
        case Fp8Blocks():
            return _blocks(values.float(), scales.float(), scheme)
        case ScaledRows():
            return values.float().mul_(scales.float().view(-1, 1))
        case PackedInts():
            runs = scales.float()[..., None]  # [rows, runs, 1]
            return _unpacked(values, scheme).view(len(values), runs.shape[1], -1).mul_(runs).flatten(1)
        case Mxfp4Experts():
            rows = torch.stack([_mxfp4_rows(blocks, s) for blocks, s in zip(values, scales, strict=True)])
            return rows.transpose(1, 2)


def _mxfp4_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values of one expert: [out, runs, 16] and [out, runs] uint8 -> [out, in] bfloat16, exactly."""
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(2)  # [out, runs, 32]
    exponents = scales.to(torch.int32) - _EXPONENT_BIAS
    return torch.ldexp(_FP4_VALUES[codes.int()], exponents[..., None]).flatten(1).bfloat16()


def _unpacked(words: Tensor, scheme: PackedInts) -> Tensor:
    """[rows, words] int32 -> [rows, cols] float32; stored is each number plus half of their range"""
    shifts = torch.arange(0, 32, scheme.bits, dtype=torch.int32)
    codes: Tensor = (words[..., None] >> shifts) & (2**scheme.bits - 1)
    return codes.flatten(1).sub_(2 ** (scheme.bits - 1)).float()


def _blocks(out: Tensor, scales: Tensor, scheme: Fp8Blocks) -> Tensor:
    """out [rows, cols], scales [row blocks, column blocks] -> out, multiplied"""
    for index, line in enumerate(scales):
        block = out[index * scheme.rows : (index + 1) * scheme.rows]
        block.mul_(line.repeat_interleave(scheme.cols)[: out.shape[1]])
    return out
