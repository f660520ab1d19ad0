"""Which operators a step is computed with: those made for the device, once they agree with torch's on a few odd rows;
torch's own everywhere else."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deltaserve.compute.layers.grouped_experts import GroupedExperts, StackedExperts, experts_one_by_one
from deltaserve.compute.layers.native_ops import TYPES, NativeOps
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, StepOpsUnavailable, TorchOps
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.model.layers.layer_spec import Activation
from deltaserve.model.layers.moe import ClampedGlu

_log = logging.getLogger(__name__)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Largest difference in the self-test, for numbers of moderate size: 16 bits may differ in the last of them."""
_CPU = torch.device("cpu")
_ON_GPUS = "deltaserve.compute.layers.triton_ops"


def make_step_ops(
    native: NativeContext | None, dtype: torch.dtype, device: torch.device = _CPU, has_experts: bool = False
) -> StepOps:
    """`dtype`: of the model; `has_experts`: whether any of its layers has. Without, none are compared."""
    try:
        ops = _made_for(native, dtype, device)
        check_step_ops(ops, dtype, device)
    except StepOpsUnavailable as error:
        _log.info("norms, rotation and gates: torch (%s)", error)
        return TorchOps()
    if has_experts and ops.grouped is not None:
        try:
            check_grouped_experts(ops.grouped, dtype, device)
        except StepOpsUnavailable as error:
            _log.warning("experts: one after the other (%s)", error)
            ops.grouped = None
    return ops


def _made_for(native: NativeContext | None, dtype: torch.dtype, device: torch.device) -> StepOps:
    if device.type != "cpu":
        try:
            module: Any = importlib.import_module(_ON_GPUS)
        except ImportError as error:
            raise StepOpsUnavailable(str(error)) from None
        ops: StepOps = module.open_triton_ops(device)
        return ops
    return NativeOps(native) if native is not None and dtype in TYPES else TorchOps()


@torch.inference_mode()
def check_step_ops(ops: StepOps, dtype: torch.dtype, device: torch.device = _CPU) -> None:
    """Against torch, on a few odd rows. Raises StepOpsUnavailable."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, added, weight, heads, head_weight = (random(*shape) for shape in ((3, 86), (3, 86), (86,), (3, 5, 44), (5, 44)))
    rope = random(3, 1, 36), random(3, 1, 36)

    def results(of: StepOps) -> tuple[Tensor, ...]:
        turned = of.turned(heads, HeadNorm(head_weight, 1e-6), rope)
        return *of.add_norm(x, added, weight, weight, 1e-6), turned, of.gated(x, Activation.SILU)

    with _told():
        pairs = list(zip(results(TorchOps()), results(ops), strict=True))
    for want, got in pairs:
        if not torch.allclose(want.float(), got.float(), rtol=_TOLERANCES[dtype], atol=_TOLERANCES[dtype]):
            raise StepOpsUnavailable("the self-test of norms, rotation and gates differs from torch")


@torch.inference_mode()
def check_grouped_experts(grouped: GroupedExperts, dtype: torch.dtype, device: torch.device = _CPU) -> None:
    """Against float32, on odd sizes: few rows to an expert and many, both gates, experts that are not held. Raises
    StepOpsUnavailable."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, num_held = 86, 44, 3

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    matrices = random(num_held, 2 * inner, hidden) / hidden**0.5, random(num_held, hidden, inner) / inner**0.5
    plain = StackedExperts(*matrices, first_expert=1)
    biases = random(num_held, 2 * inner), random(num_held, hidden)
    clamped = StackedExperts(*matrices, *biases, first_expert=1, clamped=ClampedGlu(1.7, 1.5))
    for experts, num_rows in ((plain, 5), (plain, 70), (clamped, 5)):
        x, scores = random(num_rows, hidden), torch.rand(num_rows, num_held + 2, generator=generator).to(device)
        gains, chosen = scores.topk(2, -1)
        with _told():
            want, got = experts_one_by_one(x, chosen, gains, experts), grouped(x, chosen, gains, experts).float()
        tolerance = 4 * _TOLERANCES[dtype]  # five roundings, of which those before the last product add up
        if not torch.allclose(want, got, rtol=tolerance, atol=tolerance):
            raise StepOpsUnavailable("the self-test of grouped experts differs from float32")


@contextmanager
def _told() -> Iterator[None]:
    """Whatever is raised within becomes StepOpsUnavailable."""
    try:
        yield
    except Exception as problem:  # a compiler's, a driver's: any of them leaves torch to compute
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        raise StepOpsUnavailable(f"the self-test ends with {reason}") from problem
