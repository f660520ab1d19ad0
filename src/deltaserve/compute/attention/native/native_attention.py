"""Attention by the native library: K and V are read in place from their pages, each shared split once.

Guarantee: for one instruction set and the same KV bytes, a query's results have equal bits whatever else is in its
batch, on any number of threads, and whether splits are shared or not; with Rounding.OF_POSITION a position's, too, in
whichever query it is computed.
"""

import ctypes
import logging
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, StepAttention
from deltaserve.compute.attention.attention_backend import AttentionBackend, BackendUnavailable, PagesInUse, write_slots
from deltaserve.compute.attention.opening import TOLERANCES, MakeBackend, self_test_error
from deltaserve.compute.attention.plan import shared_runs
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.native.native_library import NativeContext, NativeUnavailable, library_problem
from deltaserve.core.errors import StateError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.rounding import Rounding

_log = logging.getLogger(__name__)

_KV_TYPES = {DType.FLOAT32: 0, DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FP8_E4M3: 3}
_Q_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_LIMIT = 2**31 - 1
_LONG_LEN = {Rounding.OF_QUERY: MAX_TILED_LEN + 1, Rounding.OF_POSITION: _NO_LIMIT}


class _Work(ctypes.Structure):
    """DsWork of native.h."""

    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("num_queries", ctypes.c_int32),
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_int32),
        ("members", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("split_tokens", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("window_len", ctypes.c_int32),
        ("long_len", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
    )


class _Attend(ctypes.Structure):
    """DsAttend of native.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("q_type", ctypes.c_int32),
        ("kv_type", ctypes.c_int32),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class _Keep(ctypes.Structure):
    """DsKeep of native.h."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("plane", ctypes.c_void_p),
    )


class _Functions:
    """Functions of native.h that compute attention, with their types."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        functions.ds_plan_new.restype, functions.ds_attend.restype = pointer, ctypes.c_bool
        functions.ds_keep.restype, functions.ds_keep.argtypes = ctypes.c_bool, (ctypes.POINTER(_Keep),)
        functions.ds_plan_free.argtypes = (pointer,)
        functions.ds_plan_new.argtypes = (ctypes.POINTER(_Work), ctypes.c_int)
        functions.ds_attend.argtypes = (pointer, pointer, ctypes.c_int, ctypes.POINTER(_Attend))
        self.plan_new, self.plan_free = functions.ds_plan_new, functions.ds_plan_free
        self.attend, self.keep = functions.ds_attend, functions.ds_keep


class NativeAttention(AttentionBackend):
    """AttentionBackend by the native library, on the CPU. For one thread at a time."""

    def __init__(self, pool: KvPool, tables: PageTable, query_heads: Sequence[int], context: NativeContext) -> None:
        super().__init__(pool, tables, query_heads)
        self._context = context
        self._functions = _Functions(context.functions)

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        return NativeStep(self, arena, table, batch, rows_per_head)

    @property
    def scratch_bytes(self) -> int:
        return self._context.scratch_bytes

    def free_scratch(self) -> None:
        self._context.free_scratch()

    def make_plan(self, arena: KvArena, table: Table, batch: Batch, group_size: int) -> int:
        """Address of a DsPlan. `group_size`: heads of queries per head of keys."""
        group, window_len = arena.layout.group, arena.layout.group.retention.window_len
        queries = _ints([(query.line, query.q_start, query.q_len) for query in batch.queries])
        shared = list(shared_runs(batch, window_len))
        runs = _ints([(run.start, run.end, len(run.queries)) for run in shared])
        members = _ints([index for run in shared for index in run.queries])
        work = _Work(
            queries=queries.ctypes.data,
            num_queries=len(queries),
            runs=runs.ctypes.data,
            num_runs=len(runs),
            members=members.ctypes.data,
            table=table.ctypes.data,
            table_stride=table.strides[0] // table.itemsize,
            split_tokens=batch.split_tokens,
            page_size=arena.layout.page_size,
            window_len=_NO_LIMIT if window_len is None else window_len,
            long_len=_LONG_LEN[self._context.rounding],
            num_kv_heads=arena.layout.num_heads,
            group_size=group_size,
            head_dim=group.head_dim,
            value_dim=group.value_dim,
        )
        plan = self._functions.plan_new(ctypes.byref(work), self._context.num_threads)
        if not plan:
            raise MemoryError(f"no memory for a plan of {batch.num_tokens} tokens")
        return int(plan)

    def free_plan(self, plan: int) -> None:
        self._functions.plan_free(plan)

    def keep(self, call: _Keep) -> None:
        if not self._functions.keep(ctypes.byref(call)):
            raise StateError("keys and values of a token for a place outside of the pages")

    def compute(self, plan: int, call: _Attend) -> None:
        isa = self._context.instruction_set.number
        if not self._functions.attend(self._context.address, plan, isa, ctypes.byref(call)):
            raise MemoryError("no scratch memory for attention")


class NativeStep:
    """A step's attention over one arena, by the native library."""

    def __init__(self, backend: NativeAttention, arena: KvArena, table: Table, batch: Batch, group_size: int) -> None:
        self._backend = backend
        self._arena = arena
        self._slots = write_slots(arena, table, batch)
        self._num_tokens = batch.num_tokens
        self._plan = backend.make_plan(arena, table, batch, group_size)
        weakref.finalize(self, backend.free_plan, self._plan)

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Write the step's keys and values: planes [T, H, D] each."""
        for plane, values in enumerate(planes):
            kept = self._arena.plane(layer, plane)
            shape = (self._num_tokens, self._arena.layout.num_heads, kept.shape[1])
            if values.shape != shape or values.dtype != kept.dtype or values.stride(2) != 1:  # converted, or refused
                self._arena.scatter(layer, plane, self._slots, values.reshape(-1, values.shape[-1]))
                continue
            size = values.itemsize
            call = _Keep(
                *values.shape[:2],
                kept.shape[1] * size,
                kept.shape[0],
                values.data_ptr(),
                values.stride(0) * size,
                values.stride(1) * size,
                self._slots.data_ptr(),
                kept.data_ptr(),
            )
            self._backend.keep(call)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]"""
        arena, group = self._arena, self._arena.layout.group
        if q.shape[0] != self._num_tokens or q.shape[2] != group.head_dim:
            raise StateError(f"queries of shape {tuple(q.shape)} in a step of {self._num_tokens} tokens")
        q = q if q.stride(2) == 1 else q.contiguous()
        out = q.new_empty(*q.shape[:-1], group.value_dim)
        row_bytes = group.head_dim * group.dtype.itemsize
        plane_bytes = arena.layout.page_size * row_bytes
        keys = arena.bytes.data_ptr() + layer * group.planes * plane_bytes
        if sinks is not None:
            sinks = sinks.float().contiguous()
        call = _Attend(
            q=q.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out=out.data_ptr(),
            q_type=_Q_TYPES[q.dtype],
            kv_type=_KV_TYPES[group.dtype],
            keys=keys,
            values=keys + (group.planes - 1) * plane_bytes,
            page_stride=arena.page_bytes,
            head_stride=arena.rows_per_head * plane_bytes,
            token_stride=row_bytes,
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=scale,
        )
        self._backend.compute(self._plan, call)
        return out


def _ints(values: Sequence[int] | Sequence[tuple[int, ...]]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def open_attention(pages: PagesInUse) -> NativeAttention:
    """The backend with the fastest instruction set that passes its self-test. Raises BackendUnavailable."""
    native = pages.native
    if native is None:
        raise BackendUnavailable(library_problem() or "nobody opened it")

    def make(pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> NativeAttention:
        return NativeAttention(pool, tables, query_heads, native)

    try:
        while (problem := _problem(pages, make)) is not None:
            name = native.instruction_set.name
            _log.warning("attention: the self-test on %s differs from torch by %.1g", name, problem)
            native.use_slower_set()
    except NativeUnavailable as error:
        raise BackendUnavailable(str(error)) from None
    _log.info("attention: native, %s", native.instruction_set.name)
    return make(pages.pool, pages.tables, pages.query_heads)


def _problem(pages: PagesInUse, make: MakeBackend) -> float | None:
    """By how much results differ from torch's, where that is too much; None: the backend is right."""
    for arena, num_heads in zip(pages.pool.page_arenas, pages.query_heads, strict=True):
        is_pairs = arena.layout.group.dtype is DType.BFLOAT16  # which some instruction sets multiply as such
        for dtype in (torch.float32, torch.bfloat16) if is_pairs else (torch.float32,):
            difference = self_test_error(arena, num_heads, dtype, make)
            if not difference <= TOLERANCES[dtype]:
                return difference
    return None
