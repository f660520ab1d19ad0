"""The work list of a step in the device's memory: one buffer, filled by one copy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.plan import Int32s, WorkTiles
from deltaserve.compute.memory.host_arrays import on_device

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

    def widened(self, other: "WorkCapacity") -> "WorkCapacity":
        """Room for what fits in either."""
        return WorkCapacity(*map(max, self, other))


class WorkBuffer:
    """Tensors of int32; their meaning is that of `WorkTiles`."""

    def __init__(self, memory: Tensor, capacity: WorkCapacity) -> None:
        """memory [all fields] int32"""
        self.capacity = capacity
        fields = [memory[start : start + size] for start, size in _fields(capacity)]
        self.num_tokens, self.num_short, self.num_long, *fields = fields  # [1] each: how many the step has
        self.positions, self.first_parts, self.part_starts, self.write_pages, *fields = fields
        self.short, self.long, self.tokens, self.pages = fields

    @classmethod
    def of(cls, work: WorkTiles, device: torch.device) -> "WorkBuffer":
        """The buffer of this one step. On a GPU the copy waits for nothing."""
        capacity = WorkCapacity.of(work)
        return cls(on_device(_packed(work, capacity), device), capacity)


def fields_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and size of each of some fields of int32, one behind the other."""
    places, start = [], 0
    for size in sizes:
        places.append((start, size))
        start += -(-size // _ALIGNED) * _ALIGNED
    return places


def _fields(capacity: WorkCapacity) -> list[tuple[int, int]]:
    num_tokens = capacity.tokens
    counts, of_tokens = (1, 1, 1), (num_tokens, num_tokens, num_tokens + 1, num_tokens)
    return fields_of((*counts, *of_tokens, 8 * capacity.short, 8 * capacity.long, capacity.listed, capacity.pages))


def _packed(work: WorkTiles, capacity: WorkCapacity) -> Int32s:
    """[all fields]"""
    counts = [np.array([count], np.int32) for count in (len(work.positions), len(work.short), len(work.long))]
    values = (
        *counts,
        work.positions,
        work.first_parts,
        work.part_starts,
        work.write_pages,
        work.short.reshape(-1),
        work.long.reshape(-1),
        work.tokens,
        work.pages,
    )
    places = _fields(capacity)
    packed = np.zeros(sum(places[-1]), np.int32)
    for (start, size), array in zip(places, values, strict=True):
        packed[start : start + size] = array
    return packed
