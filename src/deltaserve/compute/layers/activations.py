"""Functions of single values, equal bits wherever a value stands.

torch computes its own sigmoid, silu, softplus and gelu of a CPU in vectors, and what is left over behind the last whole
vector with other instructions: the last bits of a value would follow from how many stand before it, which a step's
company decides. exp, log1p, tanh and plain arithmetic have one form.
"""

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

_GELU_SCALE, _GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715
_LINEAR_FROM = 20.0
"""Beyond it softplus is its input."""


def sigmoid(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return x.sigmoid()
    return _sigmoid(x.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return functional.silu(x)
    wide = x.float()
    return _sigmoid(wide).mul_(wide).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    inner = (wide * wide).mul_(_GELU_CUBE).add_(1.0).mul_(wide).mul_(_GELU_SCALE)
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of x, in float32."""
    if x.device.type != "cpu":
        return functional.softplus(x)
    return torch.where(x > _LINEAR_FROM, x, x.exp().log1p_())


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) as a new tensor."""
    return x.neg().exp_().add_(1.0).reciprocal_()
