"""The self-test of backends: each is compared with the reference before it computes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.attention_backend import AttentionBackend, BackendUnavailable, PagesInUse
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec

_log = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference in the self-test, by the type of its queries; torch computes in float32 in any case."""

MakeBackend = Callable[[KvPool, PageTable, Sequence[int]], AttentionBackend]


def open_kernels(name: str, make: MakeBackend, pages: PagesInUse, is_interpreted: bool) -> AttentionBackend:
    """A backend of kernels for GPUs, or of such that are interpreted on the CPU, which has passed its self-test.

    Raises BackendUnavailable.
    """
    device = pages.device
    if is_interpreted and device.type != "cpu":
        raise BackendUnavailable("TRITON_INTERPRET=1 is set, and its interpreter is for tests on a CPU")
    if not is_interpreted and device.type != "cuda":
        raise BackendUnavailable(f"it computes on GPUs, and the pages are on {device}")
    for arena, num_heads in zip(pages.pool.page_arenas, pages.query_heads, strict=True):
        _test_kernels(arena, num_heads, make)
    _log.info("attention: %s, %s", name, "interpreted" if is_interpreted else f"compiled for {device}")
    return make(pages.pool, pages.tables, pages.query_heads)


def _test_kernels(arena: KvArena, num_heads: int, make: MakeBackend) -> None:
    """Raises BackendUnavailable where it fails."""
    kept = arena.layout.group.dtype
    dtype = torch_dtype(DType.BFLOAT16 if kept is DType.FP8_E4M3 else kept)
    try:
        difference = self_test_error(arena, num_heads, dtype, make)
    except Exception as problem:  # a compiler's, a driver's: any of them leaves torch to compute
        raise BackendUnavailable(f"its self-test ends with {in_a_line(problem)}") from problem
    if not difference <= TOLERANCES[dtype]:
        raise BackendUnavailable(f"its self-test on {arena.bytes.device} differs from torch by {difference:.1g}")


def in_a_line(problem: Exception) -> str:
    """Kind and first line of an error."""
    reason = str(problem).partition("\n")[0]
    return f"{type(problem).__name__}: {reason}"


@torch.inference_mode()
def self_test_error(arena: KvArena, num_heads: int, dtype: torch.dtype, make: MakeBackend) -> float:
    """Largest difference from torch, for heads, window and type of the pool's own pages, each over what it has written
    there itself: a decoding row and a few positions over a shared split, and a chunk. Milliseconds, beside what
    compiling takes."""
    device = arena.bytes.device
    group = replace(arena.layout.group, num_layers=1)
    cache = CacheSpec(16, (group,))
    pool = KvPool(cache, (9,), device, arena.layout.shard)
    tables = PageTable(1, 3, 4)
    for line, pages in enumerate(((6, 1, 4), (6, 1, 3), (2, 8, 5))):
        tables.write(PoolId(0), line, 0, tuple(map(PageId, pages)))
    batch = Batch((Query(0, 40, 1), Query(1, 33, 8), Query(2, 5, 40)), 32, (Shared(0, 32, (0, 1)),))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((48, arena.layout.num_heads, group.head_dim), generator=generator).to(device)
    q = torch.randn((49, num_heads, group.head_dim), generator=generator).to(device, dtype)
    results = []
    for backend in (TorchAttention(pool, tables, (num_heads,)), make(pool, tables, (num_heads,))):
        pool.page_arenas[0].bytes.zero_()
        for line in range(3):
            backend.begin_step(Batch((Query(line, 0, 48),), 32))[0].write_kv(0, *[keys] * group.planes)
        results.append(backend.begin_step(batch)[0].attend(0, q, group.head_dim**-0.5).float())
    return float((results[0] - results[1]).abs().max())
