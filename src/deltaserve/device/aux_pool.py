"""Aux slots: host memory a peer writes a first token and its metadata into."""

import torch

from deltaserve.base.extents import Region
from deltaserve.base.ids import AuxSlot, RegionId
from deltaserve.device.kv_pool import allocate_bytes, region_of

DEFAULT_SLOT_BYTES = 2048


class AuxPool:
    """`num_slots` slots of `slot_bytes` bytes, one after the other."""

    def __init__(self, num_slots: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._bytes = allocate_bytes(num_slots * slot_bytes, torch.device("cpu"))  # [num_slots * slot_bytes] uint8
        self._view = self._bytes.numpy().data

    def read(self, slot: AuxSlot) -> bytes:
        """The whole slot."""
        start = self._start(slot)
        return bytes(self._view[start : start + self.slot_bytes])

    def write(self, slot: AuxSlot, data: bytes) -> None:
        """From the slot's first byte on; the rest stays. Raises ValueError when `data` exceeds the slot."""
        if len(data) > self.slot_bytes:
            raise ValueError(f"{len(data)} bytes in an aux slot of {self.slot_bytes}")
        start = self._start(slot)
        self._view[start : start + len(data)] = data

    def region(self, id: RegionId) -> Region:
        return region_of(self._bytes, id)

    def _start(self, slot: AuxSlot) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"aux slot {slot} of {self.num_slots}")
        return slot * self.slot_bytes
