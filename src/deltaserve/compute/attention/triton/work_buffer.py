"""The work list of a step in the device's memory: one buffer, filled by one copy.

Grids and addresses follow from its capacity alone; how much of that a step uses stands in the buffer. So a launch that
was recorded with one step's work list computes another's, once that has been copied over it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.plan import Int32s, WorkTiles
from deltaserve.compute.memory.host_arrays import on_device, write_over

_ALIGNED = 4
"""Elements to a multiple of which fields begin: Triton compiles a kernel anew for pointers that are not at 16 bytes."""


class WorkCapacity(NamedTuple):
    """How many of each there is room for."""

    tokens: int
    """Tokens of the step."""
    results: int
    """Partial results; the buffer itself holds none."""
    short: int
    """Tiles of short queries; `long` counts those of long ones."""
    long: int
    listed: int
    """Entries of `WorkTiles.tokens`."""
    pages: int
    """Entries of `WorkTiles.pages`."""

    @classmethod
    def of(cls, work: WorkTiles) -> "WorkCapacity":
        """Room that the work list needs."""
        num_tokens, num_results = len(work.positions), int(work.part_starts[-1])
        return cls(num_tokens, num_results, len(work.short), len(work.long), len(work.tokens), len(work.pages))

    def holds(self, work: WorkTiles) -> bool:
        return all(need <= room for need, room in zip(WorkCapacity.of(work), self, strict=True))


class WorkBuffer:
    """Tensors of int32; their meaning is that of `WorkTiles`. Entries beyond the step's own may be anything, but of
    `part_starts`: tokens beyond the step's have no partial results, so what is merged for them is 0."""

    def __init__(self, memory: Tensor, capacity: WorkCapacity) -> None:
        """memory [size(capacity)] int32, or less where its last field, the pages, ends before."""
        self.capacity = capacity
        self._memory = memory
        fields = [memory[start : start + size] for start, size in _fields(capacity)]
        self.num_tokens, self.num_short, self.num_long, *fields = fields  # [1] each: how many the step has
        self.positions, self.first_parts, self.part_starts, self.write_pages, *fields = fields
        self.short, self.long, self.tokens, self.pages = fields

    @classmethod
    def of(cls, work: WorkTiles, device: torch.device) -> "WorkBuffer":
        """The buffer of this one step. On a GPU the copy waits for nothing."""
        capacity = WorkCapacity.of(work)
        return cls(on_device(_packed(work, capacity), device), capacity)

    @classmethod
    def empty(cls, capacity: WorkCapacity, device: torch.device) -> "WorkBuffer":
        """A buffer for steps to come, which `fill` it."""
        return cls(torch.zeros(_size(capacity), dtype=torch.int32, device=device), capacity)

    def fill(self, work: WorkTiles) -> None:
        """The next step, for what is launched from now on. Raises ValueError where there is no room for it."""
        if not self.capacity.holds(work):
            raise ValueError(f"a step that needs {WorkCapacity.of(work)} in a buffer of {self.capacity}")
        packed = _packed(work, self.capacity)
        write_over(self._memory[: len(packed)], packed)


def _sizes(capacity: WorkCapacity) -> Iterator[int]:
    """Sizes of the fields. What a step uses least of stands last: its unused end is not copied."""
    num_tokens = capacity.tokens
    yield from (1, 1, 1)
    yield from (num_tokens, num_tokens, num_tokens + 1, num_tokens)
    yield from (8 * capacity.short, 8 * capacity.long, capacity.listed, capacity.pages)


def _fields(capacity: WorkCapacity) -> Iterator[tuple[int, int]]:
    """Start and size of each."""
    start = 0
    for size in _sizes(capacity):
        yield start, size
        start += -(-size // _ALIGNED) * _ALIGNED


def _size(capacity: WorkCapacity) -> int:
    *_, (start, size) = _fields(capacity)
    return start + size


def _packed(work: WorkTiles, capacity: WorkCapacity) -> Int32s:
    """[all fields, the last as far as the step has any]"""
    beyond = np.full(capacity.tokens - len(work.positions), work.part_starts[-1], np.int32)
    counts = [np.array([count], np.int32) for count in (len(work.positions), len(work.short), len(work.long))]
    values = (
        *counts,
        work.positions,
        work.first_parts,
        np.concatenate((work.part_starts, beyond)),
        work.write_pages,
        work.short.reshape(-1),
        work.long.reshape(-1),
        work.tokens,
        work.pages,
    )
    starts = [start for start, _ in _fields(capacity)]
    packed = np.zeros(starts[-1] + len(work.pages), np.int32)
    for start, array in zip(starts, values, strict=True):
        packed[start : start + len(array)] = array
    return packed
