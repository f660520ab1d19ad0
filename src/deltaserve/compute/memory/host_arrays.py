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


def write_over(target: Tensor, values: npt.NDArray[np.generic]) -> None:
    """Copy `values` to a tensor of their shape, for what the device is given from now on; waits for nothing.

    What the device was given before still reads what it was given: the copy stands behind it in the stream, and its
    source is pinned memory of its own, which torch gives to nobody else before the copy is done.
    """
    target.copy_(on_host(values, target.device), non_blocking=True)
