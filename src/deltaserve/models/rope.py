"""Rotary embedding: which frequencies, and how they turn a head (channel i pairs with channel i + D/2)."""

import math

import torch
from torch import Tensor

from deltaserve.models.fields import Fields
from deltaserve.models.spec import RopeKind, RopeSpec

_KINDS = {kind.value: kind for kind in RopeKind}


def rope_spec(fields: Fields, max_position: int) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    table = fields.table("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = table.positive("rope_theta") if table.has("rope_theta") else fields.positive("rope_theta", 10000.0)
    name = table.text("rope_type", table.text("type", "default"))
    if name not in _KINDS:
        raise table.error("rope_type" if table.has("rope_type") else "type", "one of " + ", ".join(_KINDS))
    if table.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise table.error("partial_rotary_factor", "1.0 for this family")
    kind = _KINDS[name]
    if kind is RopeKind.DEFAULT:
        return RopeSpec(kind, theta)
    factor = table.positive("factor")
    if kind is RopeKind.LINEAR:
        return RopeSpec(kind, theta, factor)
    original = table.integer("original_max_position_embeddings", 1, 2**26, default=max_position)
    if kind is RopeKind.LLAMA3:
        low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
        if low >= high:
            raise table.error("high_freq_factor", f"more than low_freq_factor {low}")
        return RopeSpec(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeSpec(
        kind,
        theta,
        factor,
        original,
        beta_fast=table.positive("beta_fast", 32.0),
        beta_slow=table.positive("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
        attention_factor=_yarn_attention_factor(table, factor),
    )


def _yarn_attention_factor(table: Fields, factor: float) -> float:
    if table.has("attention_factor"):
        return table.positive("attention_factor")
    mscale, all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each channel pair: [D/2] float32 on the CPU."""
    base = spec.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D/2]
    if spec.kind is RopeKind.LINEAR:
        return base / spec.factor
    if spec.kind is RopeKind.LLAMA3:
        return _llama3(spec, base)
    if spec.kind is RopeKind.YARN:
        return _yarn(spec, base, head_dim)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = spec.original_max_position * base / (2.0 * math.pi)  # [D/2] turns within the first training length
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * base + (1.0 - keep) * base / spec.factor


def _yarn(spec: RopeSpec, base: Tensor, head_dim: int) -> Tensor:
    """Peng et al. 2023: channels that turn more than beta_fast times are kept, less than beta_slow interpolated."""

    def channel(turns: float) -> float:
        return head_dim * math.log(spec.original_max_position / (turns * 2.0 * math.pi)) / (2.0 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return ramp * base / spec.factor + (1.0 - ramp) * base


class Rope:
    """Turns heads by their positions."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._scale = spec.attention_factor

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions` [T] -> cos, signed sin, both [T, 1, D]; computed once per step, used by every layer."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies  # [T, D/2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] turned; `sin` carries the sign of the first half."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)
