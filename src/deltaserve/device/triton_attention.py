"""Attention by two Triton kernels: K and V are read in place from their pages, each shared split in one item.

Guarantee: for one batch and the same KV bytes, a position's result has equal bits whether splits are shared or not.
See work_tiles.py for the partition. Needs triton when it is imported.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from deltaserve.base.errors import StateError
from deltaserve.device.attention import Batch, Shared, StepAttention
from deltaserve.device.host_arrays import on_device
from deltaserve.device.kv_pool import KvArena
from deltaserve.device.page_table import Table
from deltaserve.device.paged_attention import PagedAttention
from deltaserve.device.torch_attention import write_slots
from deltaserve.device.triton_kernels import IS_INTERPRETED, partial_results
from deltaserve.device.triton_merge import PartialResults, merge_partial_results
from deltaserve.device.work_tiles import TileSize, plan_work, sharers
from deltaserve.device.workspace import Workspace
from deltaserve.layout.dtype import DType

_LOG2_E = 1.4426950408889634
_LEAST_DIM = 16
"""Of a product on tensor cores."""
_WIDE_DIM = 256
"""Heads of more channels have fewer rows and keys at once: a tile has to fit in a multiprocessor."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonAttention(PagedAttention):
    """See PagedAttention."""

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        return TritonStep(arena, table, batch, rows_per_head, self._workspace)

    def _num_readers(self, batch: Batch, run: Shared) -> int:
        return len(sharers(batch, run))


class TritonStep:
    """StepAttention over one arena."""

    def __init__(self, arena: KvArena, table: Table, batch: Batch, group_size: int, scratch: Workspace) -> None:
        group = arena.layout.group
        self._arena = arena
        self._group_size = group_size
        self._window_len = group.retention.window_len
        self._scratch = scratch
        self._slots = write_slots(arena, table, batch)
        self._num_tokens = batch.num_tokens
        self._sizes = tile_sizes(group_size, group.head_dim)
        work = plan_work(batch, table, arena.layout.page_size, group_size, self._window_len, self._sizes)
        self._num_results = int(work.part_starts[-1])
        shared = (work.tokens, work.positions, work.first_parts, work.part_starts, work.pages)
        short, long, *rest = _copied((work.short.reshape(-1), work.long.reshape(-1), *shared), arena.bytes.device)
        self._tiles = (short, long)
        self._tokens, self._positions, self._first_parts, self._part_starts, self._pages = rest

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """[T, H, D] each"""
        for plane, values in enumerate(planes):
            self._arena.scatter(layer, plane, self._slots, values.reshape(-1, values.shape[-1]))

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]"""
        group = self._arena.layout.group
        if q.shape[0] != self._num_tokens or q.shape[2] != group.head_dim:
            raise StateError(f"queries of shape {tuple(q.shape)} in a step of {self._num_tokens} tokens")
        q = q if q.stride(2) == 1 else q.contiguous()
        num_heads = q.shape[1]
        outs = self._scratch.take("outs", (self._num_results, num_heads, group.value_dim), torch.float32)
        sums = self._scratch.take("sums", (self._num_results, num_heads), torch.float32)
        out = q.new_empty(*q.shape[:-1], group.value_dim)
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            for tiles, size in zip(self._tiles, self._sizes, strict=True):
                if len(tiles):
                    self._compute(tiles, size, layer, q, scale, outs, sums)
            if self._num_tokens:
                merge_partial_results(PartialResults(outs, sums, self._part_starts), sinks, out)
        return out

    def _compute(
        self, tiles: Tensor, size: TileSize, layer: int, q: Tensor, scale: float, outs: Tensor, sums: Tensor
    ) -> None:
        arena, group, num_heads = self._arena, self._arena.layout.group, q.shape[1]
        row = arena.layout.page_size * group.head_dim
        d1, d2 = split_dim(group.head_dim)
        v1, v2 = split_dim(group.value_dim)
        compute = compute_type(q.dtype, group.dtype)
        partial_results[len(tiles) // 8, arena.layout.num_heads](
            q,
            arena.plane(layer, 0),
            arena.plane(layer, group.planes - 1),
            tiles,
            self._tokens,
            self._positions,
            self._first_parts,
            self._pages,
            outs,
            sums,
            q.stride(0),
            q.stride(1),
            arena.rows_per_page * row,
            arena.rows_per_head * row,
            scale * _LOG2_E,
            NUM_HEADS=num_heads,
            GROUP_SIZE=self._group_size,
            PAGE_SIZE=arena.layout.page_size,
            WINDOW=self._window_len or 0,
            D=group.head_dim,
            DV=group.value_dim,
            D1=d1,
            D2=d2,
            V1=v1,
            V2=v2,
            ROWS=size.rows,
            KEYS=size.keys,
            FP8=group.dtype is DType.FP8_E4M3,
            COMPUTE=_TYPES[compute],
            num_warps=num_warps(group.head_dim),
            num_stages=1 if compute is torch.float32 else 2,
        )


def tile_sizes(group_size: int, head_dim: int) -> tuple[TileSize, TileSize]:
    """Of tiles of short queries and of long ones. The first are few rows: a product of a decoding row alone, padded to
    them, should take less time than its keys."""
    most, keys = (32, 32) if head_dim > _WIDE_DIM else (64, 64)
    return TileSize(min(most, max(16, _power_of_two(group_size))), keys), TileSize(most, keys)


def num_warps(head_dim: int) -> int:
    """Of a program of partial results."""
    return 8 if head_dim > _WIDE_DIM else 4


def split_dim(dim: int) -> tuple[int, int]:
    """Two powers of two that hold so many channels; the second may be 0."""
    first = max(_LEAST_DIM, 1 << dim.bit_length() - 1)
    return first, max(_LEAST_DIM, _power_of_two(dim - first)) if dim > first else 0


def compute_type(q: torch.dtype, kept: DType) -> torch.dtype:
    """In which products are computed; sums are float32 always. The interpreter multiplies no bfloat16."""
    of_pages = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
    found = q if of_pages.get(kept, q) is q else torch.float32
    return torch.float32 if IS_INTERPRETED and found is torch.bfloat16 else found


def _power_of_two(number: int) -> int:
    """The first one that is not less."""
    return 1 << (number - 1).bit_length()


def _copied(arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int32]]], device: torch.device) -> list[Tensor]:
    """On the device, by one copy that waits for nothing."""
    sizes = [array.size for array in arrays]
    return list(torch.split(on_device(np.concatenate(arrays), device), sizes))
