"""Memory of a GPU as a tensor, with a descriptor by which other processes map it (transports/cuda_driver.py)."""

import weakref

import torch
from torch import Tensor

from deltaserve.transports.cuda_driver import CudaDriver, CudaMapping


class _Bytes:
    """A mapping in the form in which torch takes memory of others; torch keeps it as long as a tensor is over it."""

    def __init__(self, mapping: CudaMapping, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }
        # Not at the end of the process, which unmaps all by itself: threads may still compute then.
        weakref.finalize(self, mapping.close).atexit = False


def exported_zeros(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """[num_bytes] uint8 zeros, and a descriptor of them, which the caller closes. Raises CudaError."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # there is a context now, if there was none
        mapping, file = CudaDriver(torch.cuda.current_device()).allocate(num_bytes)
        data = torch.as_tensor(_Bytes(mapping, num_bytes), device=f"cuda:{torch.cuda.current_device()}").zero_()
        torch.cuda.current_stream().synchronize()  # others read it on streams of their own
    return data, file
