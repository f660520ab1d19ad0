"""What draws in recorded steps."""

import importlib
from typing import Any

import torch

from deltaserve.compute.executor.resident_draws import MakeDraws, TorchDraws

_ON_GPUS = "deltaserve.compute.executor.triton_draws"


def draws_on(device: torch.device) -> MakeDraws:
    """Triton's kernels on a GPU, where they can be had, or else torch."""
    if device.type == "cpu":
        return TorchDraws
    try:
        module: Any = importlib.import_module(_ON_GPUS)
    except ImportError:
        return TorchDraws
    found: MakeDraws = module.TritonDraws
    return found
