"""Which attention backend computes: the native library on a CPU and Triton's kernels on a GPU where they work, torch
everywhere else.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import PageId, PoolId
from deltaserve.device.attention import AttentionBackend, Batch, Query, Shared
from deltaserve.device.element_conversion import torch_dtype
from deltaserve.device.kv_pool import KvArena, KvPool
from deltaserve.device.native_attention import NativeAttention
from deltaserve.device.page_table import PageTable
from deltaserve.device.torch_attention import TorchAttention
from deltaserve.layout.dtype import DType
from deltaserve.layout.spec import CacheSpec
from deltaserve.native.native_library import NativeContext, NativeLibrary, NativeUnavailable

log = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "native", "torch", "triton"]
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the self-test, by the type of its queries; torch computes in float32 in any case."""
_KERNELS = "deltaserve.device.triton_attention"

_MakeBackend = Callable[[KvPool, PageTable, Sequence[int]], AttentionBackend]


class TritonUnavailable(Exception):
    """Why Triton's kernels do not compute, in words for an operator."""


def open_native(choice: AttentionChoice, device: torch.device, num_threads: int) -> NativeContext | None:
    """What this process computes with natively, with the fastest instruction set; None: with torch, or Triton.

    Raises ConfigError where native was asked for and cannot be had.
    """
    if choice in ("torch", "triton") or (choice == "auto" and device.type != "cpu"):
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
    choice: AttentionChoice,
    native: NativeContext | None,
    pool: KvPool,
    tables: PageTable,
    query_heads: Sequence[int],
) -> AttentionBackend:
    """`native`: of open_native. `query_heads`: of each page group, on this rank. Raises ConfigError where what was
    asked for cannot be had."""
    on_gpu = pool.arenas[0].bytes.device.type == "cuda"
    try:
        if native is not None:
            backend = _make_native(native, pool, tables, query_heads)
            log.info("attention: native, %s", native.instruction_set.name)
            return backend
        if choice == "triton" or (choice == "auto" and on_gpu):
            return _make_triton(pool, tables, query_heads)
    except (NativeUnavailable, TritonUnavailable) as error:
        _fall_back(choice, error)
    return TorchAttention(pool, tables, query_heads)


def _make_native(native: NativeContext, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> NativeAttention:
    def make(pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> NativeAttention:
        return NativeAttention(pool, tables, query_heads, native)

    for arena, num_heads in zip(pool.page_arenas, query_heads, strict=True):
        difference = _self_test_error(arena, num_heads, torch.float32, make)
        if not difference <= _TOLERANCES[torch.float32]:
            name = native.instruction_set.name
            raise NativeUnavailable(f"its self-test on {name} differs from torch by {difference:.1g}")
    return make(pool, tables, query_heads)


def _make_triton(pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> AttentionBackend:
    device = pool.arenas[0].bytes.device
    try:
        kernels: Any = importlib.import_module(_KERNELS)
    except ImportError as error:
        raise TritonUnavailable(f"{error}; pip install 'deltaserve[triton]'") from None
    if kernels.IS_INTERPRETED and device.type != "cpu":
        raise TritonUnavailable("TRITON_INTERPRET=1 is set, and its interpreter is for tests on a CPU")
    if not kernels.IS_INTERPRETED and device.type != "cuda":
        raise TritonUnavailable(f"it computes on GPUs, and the pages are on {device}")
    make: _MakeBackend = kernels.TritonAttention
    for arena, num_heads in zip(pool.page_arenas, query_heads, strict=True):
        kept = arena.layout.group.dtype
        dtype = torch_dtype(DType.BFLOAT16 if kept is DType.FP8_E4M3 else kept)
        try:
            difference = _self_test_error(arena, num_heads, dtype, make)
        except Exception as problem:  # a compiler's, a driver's: any of them leaves torch to compute
            reason = str(problem).partition("\n")[0]
            raise TritonUnavailable(f"its self-test ends with {type(problem).__name__}: {reason}") from problem
        if not difference <= _TOLERANCES[dtype]:
            raise TritonUnavailable(f"its self-test on {device} differs from torch by {difference:.1g}")
    log.info("attention: triton, %s", "interpreted" if kernels.IS_INTERPRETED else f"compiled for {device}")
    return make(pool, tables, query_heads)


def _fall_back(choice: AttentionChoice, error: NativeUnavailable | TritonUnavailable) -> None:
    if choice != "auto":
        raise ConfigError(f"--attention-backend {choice}: {error}") from None
    missing = "native library" if isinstance(error, NativeUnavailable) else "triton"
    log.info("attention: torch (no %s: %s)", missing, error)


@torch.inference_mode()
def _self_test_error(arena: KvArena, num_heads: int, dtype: torch.dtype, make: _MakeBackend) -> float:
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
