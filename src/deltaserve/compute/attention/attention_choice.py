"""Which attention backend computes: the native library on a CPU and Triton's kernels on a GPU where they work, torch
everywhere else; FlashInfer's kernels where they are asked for by name.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from deltaserve.compute.attention.attention import AttentionBackend, Batch, Query, Shared
from deltaserve.compute.attention.flashinfer.flashinfer_limits import flashinfer_refusal
from deltaserve.compute.attention.native_attention import NativeAttention
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.native.native_library import NativeContext, NativeLibrary, NativeUnavailable
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.rounding import Rounding

log = logging.getLogger(__name__)

AttentionChoice = Literal["auto", "native", "torch", "triton", "flashinfer"]
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference in the self-test, by the type of its queries; torch computes in float32 in any case."""

_MakeBackend = Callable[[KvPool, PageTable, Sequence[int]], AttentionBackend]


@dataclass(frozen=True, slots=True)
class GpuBackend:
    """Kernels of an optional package, which the extra of this backend's name installs."""

    module: str
    """Name of our module that imports the package. It has IS_INTERPRETED, see triton_kernels.py."""
    constructor: Callable[[Any], _MakeBackend]
    """Function that returns the backend's constructor, given the imported module."""
    refusal: Callable[[KvLayout], str | None] = lambda layout: None
    """Why it has no kernels for such pages; None: it has."""


_GPU_BACKENDS = {
    "triton": GpuBackend("deltaserve.compute.attention.triton.triton_attention", lambda module: module.TritonAttention),
    "flashinfer": GpuBackend(
        "deltaserve.compute.attention.flashinfer.flashinfer_attention",
        lambda module: module.FlashInferAttention,
        flashinfer_refusal,
    ),
}
_FIRST_ON_GPU = "triton"
"""What `auto` is there: the only one of which equal bits are promised whether splits are shared or not."""


class KernelsUnavailable(Exception):
    """Why a GPU backend does not compute, in words for an operator."""


def open_native(
    choice: AttentionChoice, device: torch.device, num_threads: int, rounding: Rounding = Rounding.OF_QUERY
) -> NativeContext | None:
    """What this process computes with natively, with the fastest instruction set; None: with torch, or on a GPU.

    Raises ConfigError where native was asked for and cannot be had.
    """
    if choice == "torch" or choice in _GPU_BACKENDS or (choice == "auto" and device.type != "cpu"):
        return None
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"it computes on the CPU, and the pages are on {device}")
        library = NativeLibrary()
        return NativeContext(library, library.instruction_sets[-1], num_threads, rounding)
    except NativeUnavailable as error:
        _fall_back(choice, "native library", error)
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
    if native is not None:
        try:
            backend = _make_native(native, pool, tables, query_heads)
            log.info("attention: native, %s", native.instruction_set.name)
            return backend
        except NativeUnavailable as error:
            _fall_back(choice, "native library", error)
    on_gpu = pool.arenas[0].bytes.device.type == "cuda"
    name = _FIRST_ON_GPU if choice == "auto" and on_gpu else choice
    if name in _GPU_BACKENDS:
        try:
            return _make_on_gpu(name, pool, tables, query_heads)
        except KernelsUnavailable as error:
            _fall_back(choice, name, error)
    return TorchAttention(pool, tables, query_heads)


def _make_native(native: NativeContext, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> NativeAttention:
    def make(pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> NativeAttention:
        return NativeAttention(pool, tables, query_heads, native)

    while (problem := _native_problem(pool, query_heads, make)) is not None:
        log.warning("attention: the self-test on %s differs from torch by %.1g", native.instruction_set.name, problem)
        native.use_slower_set()
    return make(pool, tables, query_heads)


def _native_problem(pool: KvPool, query_heads: Sequence[int], make: _MakeBackend) -> float | None:
    """By how much results differ from torch's, where that is too much; None: the backend is right."""
    for arena, num_heads in zip(pool.page_arenas, query_heads, strict=True):
        is_pairs = arena.layout.group.dtype is DType.BFLOAT16  # which some instruction sets multiply as such
        for dtype in (torch.float32, torch.bfloat16) if is_pairs else (torch.float32,):
            difference = _self_test_error(arena, num_heads, dtype, make)
            if not difference <= _TOLERANCES[dtype]:
                return difference
    return None


def _make_on_gpu(name: str, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> AttentionBackend:
    device, backend = pool.arenas[0].bytes.device, _GPU_BACKENDS[name]
    for arena in pool.page_arenas:
        refusal = backend.refusal(arena.layout)
        if refusal is not None:
            raise KernelsUnavailable(refusal)
    try:
        module: Any = importlib.import_module(backend.module)
    except ImportError as error:
        raise KernelsUnavailable(f"{error}; pip install 'deltaserve[{name}]'") from None
    except Exception as problem:  # a package that does not fit its other half, or this machine's CUDA
        raise KernelsUnavailable(f"importing it ends with {_in_a_line(problem)}") from problem
    if module.IS_INTERPRETED and device.type != "cpu":
        raise KernelsUnavailable("TRITON_INTERPRET=1 is set, and its interpreter is for tests on a CPU")
    if not module.IS_INTERPRETED and device.type != "cuda":
        raise KernelsUnavailable(f"it computes on GPUs, and the pages are on {device}")
    make = backend.constructor(module)
    for arena, num_heads in zip(pool.page_arenas, query_heads, strict=True):
        _test_on_gpu(arena, num_heads, make)
    log.info("attention: %s, %s", name, "interpreted" if module.IS_INTERPRETED else f"compiled for {device}")
    return make(pool, tables, query_heads)


def _test_on_gpu(arena: KvArena, num_heads: int, make: _MakeBackend) -> None:
    """Raises KernelsUnavailable where it fails."""
    kept = arena.layout.group.dtype
    dtype = torch_dtype(DType.BFLOAT16 if kept is DType.FP8_E4M3 else kept)
    try:
        difference = _self_test_error(arena, num_heads, dtype, make)
    except Exception as problem:  # a compiler's, a driver's: any of them leaves torch to compute
        raise KernelsUnavailable(f"its self-test ends with {_in_a_line(problem)}") from problem
    if not difference <= _TOLERANCES[dtype]:
        raise KernelsUnavailable(f"its self-test on {arena.bytes.device} differs from torch by {difference:.1g}")


def _in_a_line(problem: Exception) -> str:
    reason = str(problem).partition("\n")[0]
    return f"{type(problem).__name__}: {reason}"


def _fall_back(choice: AttentionChoice, missing: str, error: NativeUnavailable | KernelsUnavailable) -> None:
    if choice != "auto":
        raise ConfigError(f"--attention-backend {choice}: {error}") from None
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
