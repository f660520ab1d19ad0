"""Arrays of the host on the device that computes."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_host(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of `values` for copies to the device: for CUDA in pinned memory, or else `values` themselves."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def on_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of `values`, which may be shared with them where the device is the host.

    On CUDA from pinned memory, which waits for nothing: an ordinary copy waits until the device has done all that it
    was given before, and steps would follow each other with gaps.
    """
    return on_host(values, device).to(device, non_blocking=True)
