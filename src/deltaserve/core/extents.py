"""Byte ranges, half-open."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.core.ids import RegionId


@dataclass(frozen=True, slots=True)
class Region:
    """A block of memory registered for remote access."""

    id: RegionId
    base: int
    """Address of its first byte in the owning process."""
    num_bytes: int
    device: str
    """Device that holds it: `cpu` or `cuda:N`."""
    file: int | None = None
    """Descriptor of the file that this memory maps from its beginning; None: private to its process."""


class Span(NamedTuple):
    """[offset, offset + num_bytes) of one region."""

    region: RegionId
    offset: int
    num_bytes: int


class Copy(NamedTuple):
    """Move `src` (this side) to `dst` (the peer's side); equal lengths."""

    src: Span
    dst: Span


def merge_copies(copies: Sequence[Copy]) -> list[Copy]:
    """Join neighbours that continue each other on both sides: fewer descriptors, same bytes."""
    out: list[Copy] = []
    for copy in copies:
        if out and _continues(out[-1], copy):
            last = out[-1]
            num_bytes = last.src.num_bytes + copy.src.num_bytes
            out[-1] = Copy(last.src._replace(num_bytes=num_bytes), last.dst._replace(num_bytes=num_bytes))
        else:
            out.append(copy)
    return out


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        last.src.region == copy.src.region
        and last.dst.region == copy.dst.region
        and last.src.offset + last.src.num_bytes == copy.src.offset
        and last.dst.offset + last.dst.num_bytes == copy.dst.offset
    )
