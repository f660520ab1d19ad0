"""What stands before a page in its slot, so that only the right page is believed, and only whole.

    | mark 8 | key 16 | model and part 16 | bytes 8 | checksum 8 | 0 8 |  the page, group by group

The checksum covers the header before it and the page. A slot says all of itself: a file could be read again by a later
process, though none does yet.
"""

import struct
from collections.abc import Sequence

import xxhash

_FIELDS = struct.Struct("<8s16s16sQ")
_CHECKSUM = struct.Struct("<Q8x")
_MARK = b"DSPAGE\x00\x01"
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class SlotSeal:
    """Makes headers, and compares them, for one rank of one model."""

    def __init__(self, of_whom: str) -> None:
        """`of_whom`: model, cache layout and rank; pages of another one are not believed."""
        self._owner = xxhash.xxh3_128_digest(of_whom.encode())

    def header(self, key: bytes, parts: Sequence[memoryview]) -> bytes:
        """Header of the page `key`, whose bytes are those of `parts`, one after the other."""
        fields = _FIELDS.pack(_MARK, key, self._owner, sum(part.nbytes for part in parts))
        checksum = xxhash.xxh3_64(fields)
        for part in parts:
            checksum.update(part)
        return fields + _CHECKSUM.pack(checksum.intdigest())

    def is_whole(self, header: bytes | bytearray, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Whether this header stands before the page `key`, and `parts` are all of it."""
        return bytes(header) == self.header(key, parts)
