"""Spans cut into pieces, of which a device's programs copy one after the other each."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltaserve.transports.local.memory_access import Addresses

PIECE_BYTES = 64 << 10
"""Most bytes of a piece: several for a page of a small model, so that all programs have something to do."""
WIDE = 16
"""Bytes that a thread copies at once where everything is aligned so."""


class Pieces(NamedTuple):
    """What one launch copies."""

    table: npt.NDArray[np.int64]
    """[3, pieces]: addresses of targets, of sources, and bytes."""
    is_wide: bool
    """Whether all of them are multiples of WIDE."""


def cut(targets: Addresses, sources: Addresses, lengths: Addresses) -> Pieces:
    """Arrays of equal length [spans]; no length is 0."""
    counts = (lengths + np.uint64(PIECE_BYTES - 1)) // np.uint64(PIECE_BYTES)
    ends = np.cumsum(counts)
    span = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
    offsets = (np.arange(len(span), dtype=np.uint64) - (ends - counts)[span]) * np.uint64(PIECE_BYTES)
    sizes = np.minimum(lengths[span] - offsets, np.uint64(PIECE_BYTES))
    table = np.stack([targets[span] + offsets, sources[span] + offsets, sizes]).view(np.int64)
    return Pieces(table, not (np.bitwise_or.reduce(table, axis=None) % WIDE))
