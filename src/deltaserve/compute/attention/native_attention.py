"""Attention by the native library: K and V are read in place from their pages, each shared split once.

Guarantee: for one instruction set and the same KV bytes, a query's results have equal bits whatever else is in its
batch, on any number of threads, and whether splits are shared or not; with Rounding.OF_POSITION a position's, too, in
whichever query it is computed.
"""

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, StepAttention, StepStates
from deltaserve.compute.attention.reference.torch_attention import write_slots
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.attention.tiles import tiled_members
from deltaserve.compute.attention.torch_states import step_states
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.core.errors import StateError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.rounding import Rounding

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


class NativeAttention:
    """AttentionBackend over a KvPool on the CPU. Queries of each page group have so many heads on this rank.

    For one thread at a time.
    """

    def __init__(self, pool: KvPool, tables: PageTable, query_heads: Sequence[int], context: NativeContext) -> None:
        self._pool = pool
        self._tables = tables
        self._query_heads = tuple(query_heads)
        self._context = context
        self._functions = _Functions(context.functions)

    def begin_step(self, batch: Batch) -> Sequence[StepAttention]:
        return [self.begin_group(batch, group) for group in range(len(self._query_heads))]

    def begin_group(self, batch: Batch, group: int) -> StepAttention:
        arena, num_heads = self._pool.page_arenas[group], self._query_heads[group]
        table = self._tables.table(self._pool.cache.pool_of(arena.layout.group))
        return NativeStep(self, arena, table, batch, num_heads // arena.layout.num_heads)

    def begin_states(self, batch: Batch) -> Sequence[StepStates]:
        return step_states(self._pool, self._tables, batch)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that are kept between steps."""
        return self._context.scratch_bytes

    def free_scratch(self) -> None:
        """Steps begun before are over."""
        self._context.free_scratch()

    def shared_tokens_read(self, batch: Batch) -> int:
        saved = 0
        for run in batch.shared:
            saved += max(0, len(tiled_members(batch, run)) - 1) * (run.end - run.start)
        return saved

    def make_plan(self, arena: KvArena, table: Table, batch: Batch, group_size: int) -> int:
        """Address of a DsPlan. `group_size`: heads of queries per head of keys."""
        group, window_len = arena.layout.group, arena.layout.group.retention.window_len
        queries = _ints([(query.line, query.q_start, query.q_len) for query in batch.queries])
        readers = [tiled_members(batch, run, window_len) for run in batch.shared]
        runs = _ints([(run.start, run.end, len(of)) for run, of in zip(batch.shared, readers, strict=True)])
        members = _ints([index for of_run in readers for index in of_run])
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
