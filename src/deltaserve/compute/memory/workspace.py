"""Scratch memory that is kept between steps: fresh large tensors cost a page fault per 4 KiB each time."""

from math import prod

import torch
from torch import Tensor


class Workspace:
    """One buffer per name, grown when a larger tensor is asked for. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give everything back."""
        self._buffers.clear()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any content, valid until the same name is taken again."""
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)
