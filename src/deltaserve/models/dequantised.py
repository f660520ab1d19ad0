"""The values of a quantised folder's weights, computed on the CPU one weight at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from deltaserve.models.quantised_folder import QuantisedFolder
from deltaserve.models.safetensors_folder import valid_file
from deltaserve.models.source import TensorHeader
from deltaserve.models.weight_schemes import Fp8Blocks, Mxfp4Experts, PackedInts, ScaledRows, StoredWeight, WeightScheme


def dequantised(source: QuantisedFolder) -> Iterator[tuple[TensorHeader, Callable[[], Tensor]]]:
    """Each weight, and how to read it: see `dequantise` for what is quantised, else as stored."""
    with ExitStack() as stack:  # a weight's parts may lie in several files
        files: dict[str, Any] = {}
        for shard in source.folder.shards:
            with valid_file(shard):
                files[shard.name] = stack.enter_context(safe_open(shard, "pt"))

        def read(weight: StoredWeight) -> Tensor:
            parts = []
            for part in weight.parts:
                with valid_file(source.folder.path / part.file):
                    parts.append(files[part.file].get_tensor(part.name))
            return parts[0] if len(parts) == 1 else dequantise(parts[0], parts[1], source.scheme)

        for weight in source.weights():
            yield weight.header, partial(read, weight)


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
    """Of one expert: [out, runs, 16] and [out, runs] uint8 -> [out, in] bfloat16, exactly"""
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
