"""Which attention backend computes: the native library where it works, torch everywhere else."""

import logging
from dataclasses import replace
from typing import Literal

import torch

from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import PageId, PoolId
from deltaserve.base.lifetime import KEEP_ALL
from deltaserve.device.attention import Batch, Query, Shared
from deltaserve.device.kv_pool import KvArena, KvPool
from deltaserve.device.native_attention import NativeAttention
from deltaserve.device.page_table import PageTable
from deltaserve.device.torch_attention import TorchAttention
from deltaserve.layout.spec import CacheSpec
from deltaserve.native.native_library import NativeContext, NativeLibrary, NativeUnavailable

log = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "native", "torch"]
_TOLERANCE = 1e-3
"""Of the self-test; both sides compute in float32."""


def open_native(choice: AttentionChoice, device: torch.device, num_threads: int) -> NativeContext | None:
    """What this process computes with natively, with the fastest instruction set; None: with torch alone.

    Raises ConfigError where native was asked for and cannot be had.
    """
    if choice == "torch":
        return None
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"it computes on the CPU, and the pages are on {device}")
        library = NativeLibrary()
        return NativeContext(library, library.instruction_sets[-1], num_threads)
    except NativeUnavailable as error:
        _fall_back(choice, error)
        return None


def make_attention(
    choice: AttentionChoice, native: NativeContext | None, pool: KvPool, tables: PageTable, num_heads: int
) -> TorchAttention | NativeAttention:
    """`native`: of open_native. `num_heads`: of queries, on this rank. Raises ConfigError as open_native does."""
    if native is None:
        return TorchAttention(pool, tables, num_heads)
    try:
        for arena in pool.page_arenas:
            _check(arena, num_heads, native)
    except NativeUnavailable as error:
        _fall_back(choice, error)
        return TorchAttention(pool, tables, num_heads)
    log.info("attention: native, %s", native.instruction_set.name)
    return NativeAttention(pool, tables, num_heads, native)


def _fall_back(choice: AttentionChoice, error: NativeUnavailable) -> None:
    if choice == "native":
        raise ConfigError(f"--attention-backend native: {error}") from None
    log.info("attention: torch (no native library: %s)", error)


@torch.inference_mode()
def _check(arena: KvArena, num_heads: int, native: NativeContext) -> None:
    """A few milliseconds: heads and type of the pool's own pages, a decoding row and a chunk over a shared split."""
    group = replace(arena.layout.group, num_layers=1, retention=KEEP_ALL)
    cache = CacheSpec(16, (group,))
    pool = KvPool(cache, (8,), torch.device("cpu"), arena.layout.shard)
    tables = PageTable(1, 2, 4)
    tables.write(PoolId(0), 0, 0, tuple(map(PageId, (6, 1, 4))))
    tables.write(PoolId(0), 1, 0, tuple(map(PageId, (6, 1, 3))))
    batch = Batch((Query(0, 40, 1), Query(1, 33, 8)), 32, (Shared(0, 32, (0, 1)),))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((48, arena.layout.num_heads, group.head_dim), generator=generator)
    q = torch.randn((9, num_heads, group.head_dim), generator=generator)
    oracle, computed = TorchAttention(pool, tables, num_heads), NativeAttention(pool, tables, num_heads, native)
    for line in (0, 1):
        oracle.begin_step(Batch((Query(line, 0, 48),), 32))[0].write_kv(0, *[keys] * group.planes)
    want, got = (backend.begin_step(batch)[0].attend(0, q, group.head_dim**-0.5) for backend in (oracle, computed))
    error = float((want - got).abs().max())
    if not error <= _TOLERANCE:
        name = native.instruction_set.name
        raise NativeUnavailable(f"its self-test on {name} differs from torch by {error:.1g}")
