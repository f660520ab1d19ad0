"""A rank's staging region, and the pages beside it that are gathered from and scattered to."""

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.compute.memory.staged_copies import StagedCopies
from deltaserve.core.layout.copy_plan import PlacedPages
from deltaserve.core.layout.staged_route import StagedRoute


@dataclass(frozen=True, slots=True)
class PagesOfGroup:
    """The arena of one page group."""

    arena: Tensor
    """The arena's bytes: [pages * page_bytes] uint8."""
    num_pages: int


class StagingArena:
    """Used by the transfer thread alone, for pages that no step writes."""

    def __init__(
        self, buffer: Tensor, groups: dict[str, PagesOfGroup], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`buffer` [num_bytes] uint8: the region as it is registered. `clock`: seconds."""
        self._buffer = buffer
        self._clock = clock
        self._scatter_s = 0.0
        self._groups = groups
        self._copies = StagedCopies(buffer.device)

    def gather(self, group: str, staged: StagedRoute, src: PlacedPages, tokens: range, offset: int) -> Iterator[int]:
        part = self._buffer[offset : offset + staged.num_bytes(len(tokens))]
        yield from self._copies.gather(staged, self._groups[group].arena, src, tokens, part)
        self._wait()

    def scatter(self, group: str, staged: StagedRoute, offset: int, dst: PlacedPages, tokens: range) -> Iterator[int]:
        part = self._buffer[offset : offset + staged.num_bytes(len(tokens))]
        slices = self._copies.scatter(staged, part, self._groups[group].arena, dst, tokens)
        moved: int | None = 0
        while moved is not None:
            start = self._clock()
            moved = next(slices, None)
            if moved is None:
                self._wait()
            self._scatter_s += self._clock() - start
            if moved is not None:
                yield moved

    def scatter_microseconds(self) -> int:
        return round(self._scatter_s * 1e6)

    def num_pages(self, group: str) -> int:
        return self._groups[group].num_pages

    def checksum(self, offset: int, num_bytes: int) -> int:
        return zlib.crc32(self._buffer[offset : offset + num_bytes].cpu().numpy().data)

    def _wait(self) -> None:
        """A device's copies are over before anybody is told so."""
        if self._buffer.device.type == "cuda":
            torch.cuda.current_stream(self._buffer.device).synchronize()
