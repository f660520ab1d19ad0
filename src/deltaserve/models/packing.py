"""Weight matrices laid out once for the CPU's matrix library, which otherwise does it in every product."""

from dataclasses import replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.models.weights import (
    AttentionWeights,
    DeltaWeights,
    DenseWeights,
    LayerWeights,
    Linear,
    MlaWeights,
    MoeWeights,
)

_PAYS = {torch.bfloat16: frozenset({"AVX512"}), torch.float32: frozenset({"AVX2", "AVX512"})}
"""Type |-> instruction sets with which packed products are faster (measured)."""


def packing_pays(dtype: torch.dtype, capability: str) -> bool:
    """`capability`: as torch names the instruction set."""
    return capability in _PAYS.get(dtype, ())


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> the same for `product`: opaque where packing pays, else `weight`."""
    if weight.device.type != "cpu" or not packing_pays(weight.dtype, torch.backends.cpu.get_cpu_capability()):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in], plain or packed -> [T, out]"""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    num_more = packed_rows(num_rows) - num_rows
    if num_more:  # padding by nothing copies
        x = functional.pad(x, (0, 0, 0, num_more))  # [T', in]
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[:num_rows]


def packed_rows(num_rows: int) -> int:
    """Rows of a packed product: few different ones, for oneDNN keeps generated code for each, half a MiB a matrix shape
    (684 MiB after 256 lengths of 5 shapes, 1,024 pieces being the most it keeps). Rows that fill up cost what others
    cost, so they are less than a quarter of what was asked for."""
    if num_rows <= 8:
        return num_rows
    step = min(64, 1 << (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def pack_layer(layer: LayerWeights) -> LayerWeights:
    """All matrices of a layer but routers and those of which there is one per head."""
    mlp = layer.mlp
    packed = _pack_dense(mlp) if isinstance(mlp, DenseWeights) else _pack_experts(mlp)
    return replace(layer, attention=_pack_attention(layer.attention), mlp=packed)


def _pack_attention(
    attention: AttentionWeights | MlaWeights | DeltaWeights,
) -> AttentionWeights | MlaWeights | DeltaWeights:
    out = _pack_linear(attention.out)
    if isinstance(attention, DeltaWeights):
        return replace(attention, inputs=_pack_linear(attention.inputs), out=out)
    if isinstance(attention, AttentionWeights):
        return replace(attention, qkv=_pack_linear(attention.qkv), out=out)
    q_up = None if attention.q_up is None else _pack_linear(attention.q_up)
    return replace(attention, down=_pack_linear(attention.down), q_up=q_up, out=out)


def _pack_dense(mlp: DenseWeights) -> DenseWeights:
    return DenseWeights(_pack_linear(mlp.gate_up), _pack_linear(mlp.down))


def _pack_experts(mlp: MoeWeights) -> MoeWeights:
    shared = None if mlp.shared is None else _pack_dense(mlp.shared)
    return replace(mlp, gate_up=tuple(map(pack, mlp.gate_up)), down=tuple(map(pack, mlp.down)), shared=shared)


def _pack_linear(linear: Linear) -> Linear:
    return Linear(pack(linear.weight), linear.bias)
