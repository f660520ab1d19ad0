"""StepOps on a GPU: norms, rotation and gates each by one kernel of Triton, where torch takes up to eight of its own,
products by cuBLAS without a line between, and a layer's experts at once (triton_experts.py). Needs triton when it is
imported.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.attention.triton_launch import IS_INTERPRETED, KernelLauncher, power_of_two
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, StepOpsUnavailable, TorchOps
from deltaserve.compute.layers.triton_experts import TritonExperts
from deltaserve.compute.layers.triton_op_kernels import gate_rows, norm_rows, turn_heads
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.model.layers.layer_spec import Activation

_MOST_CHANNELS = 16384
"""Most channels of a row that is normalised by one program."""
_WARP_CHANNELS = 256
"""Channels of a warp in a norm: 16 bytes of 16-bit values for each thread."""
_PROGRAM_VALUES = 1024
"""Values that one program turns or gates."""


class TritonOps(TorchOps):
    """StepOps for tensors on one GPU. For one thread at a time.

    Guarantee: norms, rotation and gates of a token have equal bits whatever else is in its step. None for products:
    cuBLAS chooses how to add up by the number of rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grouped = TritonExperts()
        self._norm_rows, self._turn_heads, self._gate_rows = map(KernelLauncher, (norm_rows, turn_heads, gate_rows))

    def product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor) and weight.is_cuda:
            return functional.linear(x, weight, bias)
        return super().product(x, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[1] > _MOST_CHANNELS:
            return super().norm(x, weight, eps)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._normalise((x, x, weight, weight, out, out), eps, False, False)
        return out

    def add_norm(
        self, x: Tensor, added: Tensor, after: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.shape[1] > _MOST_CHANNELS:
            return super().add_norm(x, added, after, weight, eps)
        x, added = x.contiguous(), added.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        tensors = x, added, weight if after is None else after, weight, total, out
        self._normalise(tensors, eps, True, after is not None)
        return total, out

    def _normalise(self, tensors: tuple[Tensor, ...], eps: float, has_added: bool, has_after: bool) -> None:
        num_rows, dim = tensors[0].shape
        if num_rows:
            width = power_of_two(dim)
            constants = (tensors[0].stride(0), dim, width, has_added, has_after)
            self._norm_rows((num_rows, 1), tensors, (eps,), constants, min(16, max(1, width // _WARP_CHANNELS)))

    def turned(self, x: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        cos, sin = rope[0].contiguous(), rope[1].contiguous()
        (num_tokens, num_heads, dim), turning = x.shape, cos.shape[-1]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not num_tokens:
            return out
        rest, width = dim - turning, power_of_two(dim)
        heads = min(power_of_two(num_heads), max(1, _PROGRAM_VALUES // width))
        constants = (
            x.stride(0),
            x.stride(1),
            num_heads,
            dim,
            turning,
            power_of_two(turning // 2),
            power_of_two(rest) if rest else 0,
            heads,
            norm is not None,
        )
        tensors, eps = (x, x if norm is None else norm.weight, cos, sin, out), 0.0 if norm is None else norm.eps
        self._turn_heads((num_tokens, -(-num_heads // heads)), tensors, (eps,), constants)
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = gate_up.contiguous()
        num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, dim)
        if num_rows:
            width = min(_PROGRAM_VALUES, power_of_two(dim))
            constants = (dim, width, activation is Activation.SILU)
            self._gate_rows((num_rows, -(-dim // width)), (gate_up, out), (), constants)
        return out


def open_triton_ops(device: torch.device) -> StepOps:
    """The operators, for tensors on this device. Raises StepOpsUnavailable."""
    if device.type != ("cpu" if IS_INTERPRETED else "cuda"):
        raise StepOpsUnavailable(f"Triton's kernels {'are interpreted' if IS_INTERPRETED else 'compute on GPUs'} here")
    return TritonOps()
