"""Arenas of recurrent states: `[slots, bytes of a slot]`, in a slot as core/layout/kv.py says."""

import torch
from torch import Tensor

from deltaserve.compute.memory.arena import Arena
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.core.layout.kv import StateBlock, StateLayout
from deltaserve.core.transport import Sharing


class StateArena(Arena):
    """One state group's memory on one device."""

    def __init__(
        self, layout: StateLayout, num_slots: int, device: torch.device, sharing: Sharing = Sharing.PRIVATE
    ) -> None:
        super().__init__(layout.page_bytes, num_slots, device, sharing)
        self.layout = layout
        elements = self.bytes.view(torch_dtype(layout.group.dtype))
        self._layers = tuple(
            tuple(self._view(elements, block, layer) for block in layout.blocks)
            for layer in range(layout.group.num_layers)
        )

    def _view(self, elements: Tensor, block: StateBlock, layer: int) -> Tensor:
        """[slots, heads, rows, width] of one layer"""
        shape = (self.num_pages, block.num_heads, block.num_rows, block.row_width)
        slot_len = self.page_bytes // self.layout.group.dtype.itemsize
        of_layer = block.num_rows * block.row_width
        strides = (slot_len, block.num_layers * of_layer, block.row_width, 1)
        return elements.as_strided(shape, strides, block.start + layer * of_layer)

    def layer_blocks(self, layer: int) -> tuple[Tensor, ...]:
        """Each block of a layer in place, [slots, heads, rows, width]; rows and width of a head are adjacent."""
        return self._layers[layer]

    def load(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """`slots` [B] int64 -> of each block a copy [B, heads, rows, width]"""
        return tuple(view.index_select(0, slots) for view in self._layers[layer])

    def store(self, layer: int, slots: Tensor, values: tuple[Tensor, ...]) -> None:
        """`slots` [B] int64, all different; of each block `values` [B, heads, rows, width], in any float dtype"""
        for view, of_block in zip(self._layers[layer], values, strict=True):
            view.index_copy_(0, slots, of_block.to(view.dtype))
