"""Launches of Triton's kernels at the cost of the launch itself. Needs triton when it is imported.

Triton's own way binds, classifies and looks up every argument at each launch, 20 to 50 us of the host for a kernel of a
few us, and asks the driver about every pointer. What is compiled follows from the types of tensors and the constants:
these are looked up here, and the compiled kernel is launched as Triton's launcher does it, with addresses as numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in numpy, on tensors of the CPU: TRITON_INTERPRET=1 was in the environment when triton was
imported."""
_ALIGNED = 16
"""Bytes to a multiple of which every tensor of a launch begins, or Triton's own way is taken: kernels are compiled for
such addresses."""
_Key = tuple[object, ...]


def power_of_two(number: int) -> int:
    """The least power of two that is no less than `number`, 1 or more. Triton's own takes 3 us of the host."""
    return 1 << (number - 1).bit_length()


class KernelLauncher:
    """One kernel. Its parameters are tensors, then numbers that Triton is told not to specialise, then constants.

    For one thread at a time.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[_Key, Any] = {}
        """Device, types of tensors and constants |-> Triton's compiled kernel."""

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[int | float, ...],
        constants: tuple[object, ...],
        num_warps: int = 4,
        num_stages: int = 1,
    ) -> None:
        """All tensors on one device. Waits for nothing, but compiles what is new."""
        device = tensors[0].get_device()
        addresses, bits = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            bits |= address
            addresses.append(address)
        key = (device, num_warps, num_stages, constants, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        if compiled is not None and not bits % _ALIGNED and torch.cuda.current_device() == device:
            compiled[(*grid, 1)](*addresses, *numbers, *constants)
            return
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = self._kernel[grid](*tensors, *numbers, *constants, **options)
        if not bits % _ALIGNED and not IS_INTERPRETED:
            self._compiled[key] = compiled
