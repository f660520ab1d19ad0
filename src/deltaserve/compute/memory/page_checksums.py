"""Checksums of pages. The host's memory is read in place; of a GPU's many pages are gathered and copied at once, for
each copy waits for the device."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from deltaserve.core.layout.copy_plan import PageSlice

CHECKED_BYTES = 8 << 20
"""Most bytes that are set aside at once to tell checksums."""
Slices = Sequence[Sequence[PageSlice]]
"""Parts of a page that count, for each arena."""


def page_checksums(arenas: Sequence[Tensor], pages: Sequence[int], slices: Slices) -> list[int]:
    """crc32 of each page over its slices of each arena ([P, page_bytes] uint8), in order."""
    is_on_host = all(arena.device.type == "cpu" for arena in arenas)
    return _crcs(arenas, pages, slices) if is_on_host else checksums_by_copy(arenas, pages, slices)


def checksums_by_copy(
    arenas: Sequence[Tensor], pages: Sequence[int], slices: Slices, most_bytes: int = CHECKED_BYTES
) -> list[int]:
    """As `page_checksums`, on any device: one gather of each arena and one copy for so many bytes of pages."""
    starts = [min((each.offset for each in of_arena), default=0) for of_arena in slices]
    ends = [max((each.offset + each.num_bytes for each in of_arena), default=0) for of_arena in slices]
    spans = [arena[:, start:end] for arena, start, end in zip(arenas, starts, ends, strict=True)]
    lengths = [span.shape[1] for span in spans]
    moved = [
        [PageSlice(offset - start, num_bytes) for offset, num_bytes in of_arena]
        for start, of_arena in zip(starts, slices, strict=True)
    ]
    step, sums = max(1, most_bytes // max(1, sum(lengths))), list[int]()
    for first in range(0, len(pages), step):
        index = torch.tensor(pages[first : first + step], dtype=torch.int64, device=arenas[0].device)
        copied = torch.cat([span.index_select(0, index) for span in spans], 1).cpu()
        sums += _crcs(torch.split(copied, lengths, 1), range(len(copied)), moved)
    return sums


def _crcs(arenas: Sequence[Tensor], pages: Sequence[int], slices: Slices) -> list[int]:
    sums = []
    for page in pages:
        crc = 0
        for arena, of_arena in zip(arenas, slices, strict=True):
            data = arena[page].numpy().data
            for offset, num_bytes in of_arena:
                crc = zlib.crc32(data[offset : offset + num_bytes], crc)
        sums.append(crc)
    return sums
