"""Arrays of the host on the device that computes."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of `values`, which may be shared with them where the device is the host.

    On CUDA from pinned memory, which waits for nothing: an ordinary copy waits until the device has done all that it
    was given before, and steps would follow each other with gaps.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def write_over(target: Tensor, values: npt.NDArray[np.generic]) -> None:
    """Copy `values` to a tensor of their shape, for what the device is given from now on; waits for nothing.

    What the device was given before still reads what it was given: the copy stands behind it in the stream, and its
    source is pinned memory of its own, which torch gives to nobody else before the copy is done.
    """
    tensor = torch.from_numpy(values)
    target.copy_(tensor.pin_memory() if target.device.type == "cuda" else tensor, non_blocking=True)
