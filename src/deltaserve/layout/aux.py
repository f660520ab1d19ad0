"""The aux slot: a header that proves what it belongs to, then the first token and its metadata.

magic 4 | decode boot 8 | prefill boot 8 | ticket 8 | generation 4 | length 4 | crc32 of the payload 4 | payload
"""

import struct
import zlib
from dataclasses import dataclass

from deltaserve.base.extents import Span
from deltaserve.base.ids import AuxSlot, RegionId

_HEADER = struct.Struct("<4sQQQIII")
_MAGIC = b"dsAX"


@dataclass(frozen=True, slots=True)
class AuxTag:
    """What an aux record answers: a ticket and the slot's generation when it was granted."""

    decode_boot: int
    prefill_boot: int
    ticket: int
    generation: int


@dataclass(frozen=True, slots=True)
class AuxLayout:
    """Arena `[slot][slot_bytes]`, host memory."""

    slot_bytes: int = 2048

    @property
    def max_payload_bytes(self) -> int:
        return self.slot_bytes - _HEADER.size

    def span(self, region: RegionId, slot: AuxSlot, num_bytes: int) -> Span:
        return Span(region, slot * self.slot_bytes, num_bytes)

    def pack(self, tag: AuxTag, payload: bytes) -> bytes:
        """Raises ValueError when the payload does not fit a slot."""
        if len(payload) > self.max_payload_bytes:
            raise ValueError(f"aux payload of {len(payload)} bytes exceeds {self.max_payload_bytes}")
        header = _HEADER.pack(
            _MAGIC,
            tag.decode_boot,
            tag.prefill_boot,
            tag.ticket,
            tag.generation,
            len(payload),
            zlib.crc32(payload),
        )
        return header + payload

    def unpack(self, tag: AuxTag, data: bytes) -> bytes | str:
        """The payload of a slot's bytes, or in words what is wrong with them."""
        magic, *fields, length, crc = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            return "aux slot holds no record"
        found = AuxTag(*fields)
        if found != tag:
            return f"aux record belongs to {found}, expected {tag}"
        payload = bytes(data[_HEADER.size : _HEADER.size + length])
        if len(payload) != length or zlib.crc32(payload) != crc:
            return "aux record is damaged"
        return payload
