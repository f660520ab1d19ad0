"""Which operators a step is computed with: those made for the device, once they agree with torch's on a few odd rows;
torch's own everywhere else."""

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from deltaserve.compute.layers.native_ops import TYPES, NativeOps
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, StepOpsUnavailable, TorchOps
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.model.layers.layer_spec import Activation

_log = logging.getLogger(__name__)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Largest difference in the self-test, for numbers of moderate size: 16 bits may differ in the last of them."""
_CPU = torch.device("cpu")
_ON_GPUS = "deltaserve.compute.layers.triton_ops"


def make_step_ops(native: NativeContext | None, dtype: torch.dtype, device: torch.device = _CPU) -> StepOps:
    """`dtype`: of the model."""
    try:
        ops = _made_for(native, dtype, device)
        check_step_ops(ops, dtype, device)
    except StepOpsUnavailable as error:
        _log.info("norms, rotation and gates: torch (%s)", error)
        return TorchOps()
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

    try:
        pairs = list(zip(results(TorchOps()), results(ops), strict=True))
    except Exception as problem:  # a compiler's, a driver's: any of them leaves torch to compute
        reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        raise StepOpsUnavailable(f"the self-test ends with {reason}") from problem
    for want, got in pairs:
        if not torch.allclose(want.float(), got.float(), rtol=_TOLERANCES[dtype], atol=_TOLERANCES[dtype]):
            raise StepOpsUnavailable("the self-test of norms, rotation and gates differs from torch")
