"""Rotary embedding: which frequencies, and how they turn a head (channel i pairs with i + R/2 of the R that turn)."""

import math

import torch
from torch import Tensor

from deltaserve.model.layers.layer_spec import RopeKind, RopeSpec


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each channel pair: [R/2] float32 on the CPU."""
    base = spec.theta ** (-torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)  # [R/2]
    if spec.kind is RopeKind.LINEAR:
        return base / spec.factor
    if spec.kind is RopeKind.FACTORS:
        return base / torch.tensor(spec.factors, dtype=torch.float32)
    if spec.kind is RopeKind.LLAMA3:
        return _llama3(spec, base)
    if spec.kind is RopeKind.YARN:
        return _yarn(spec, base)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    turns = spec.original_max_position * base / (2.0 * math.pi)  # [R/2] turns within the first training length
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * base + (1.0 - keep) * base / spec.factor


def _yarn(spec: RopeSpec, base: Tensor) -> Tensor:
    """Peng et al. 2023: channels that turn more than beta_fast times are kept, less than beta_slow interpolated."""

    def channel(turns: float) -> float:
        return spec.dim * math.log(spec.original_max_position / (turns * 2.0 * math.pi)) / (2.0 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return ramp * base / spec.factor + (1.0 - ramp) * base


class Rope:
    """Turns heads by their positions."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)
        self._scale = spec.attention_factor

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions` [T] -> cos, signed sin, both [T, 1, R]; computed once per step, used by every layer."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies  # [T, R/2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def halves_apart(x: Tensor) -> Tensor:
    """[.., D] of channels that turn in pairs 2i, 2i + 1 -> the same with those of a pair D/2 apart."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] with its first channels turned, as many as cos, sin [T, 1, R] have; `sin` carries the sign."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), -1)
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)
