"""Attention by FlashInfer's prefill kernels over pages, fed with the items of our work list.

A step of a page group is two wrappers of FlashInfer, planned once and run per layer (see flashinfer_plan.py), and the
merge of their results by our own kernel. K and V are read in place: a layer's pages are a view of the arena, whose
strides FlashInfer takes as they are. Needs its package and that of the merge when it is imported.

No equal bits are promised: FlashInfer's tiles follow from all that is in the batch, and its partial results are in the
type of the queries. What is promised is a difference from plain attention like that of rounding to this type: 2e-3 of
float16 values around 1.

The sources of flashinfer-python 0.6.0 and 0.7.2.post1 were read, of which this follows:
- `kv_layout` "HND" is [pages, heads, tokens, channels] by any strides with adjacent channels, equal ones of K and V.
- Causal rows are aligned at the end: the last row of a request sees its last key.
- `window_left` counts keys before a row's own; -1: all.
- The log-sum-exp is float32, to base 2, of scores times `sm_scale`.
- Without split-kv the float workspace is not used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flashinfer
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, StepAttention
from deltaserve.compute.attention.attention_backend import AttentionBackend, PagesInUse, write_slots
from deltaserve.compute.attention.flashinfer.flashinfer_plan import PagedRequests, plan_requests
from deltaserve.compute.attention.flashinfer.kind import KIND, WRAPPER_BYTES
from deltaserve.compute.attention.opening import open_kernels
from deltaserve.compute.attention.triton_launch import IS_INTERPRETED
from deltaserve.compute.attention.triton_merge import PartialMerge, PartialResults
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.host_arrays import on_device, on_host
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.core.errors import StateError
from deltaserve.core.layout.dtype import DType

_KERNELS = "fa2"
"""Family of FlashInfer's kernels for every GPU, with fp8 pages beside 16-bit queries and without split-kv."""
_UNUSED_BYTES = 1 << 20
"""A wrapper wants a float workspace."""
_QUERY_DTYPES = (torch.bfloat16, torch.float16)


class FlashInferAttention(AttentionBackend):
    """See AttentionBackend. For pages that kind.py refuses none of."""

    def __init__(self, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> None:
        super().__init__(pool, tables, query_heads)
        self._wrappers = {arena: _GroupWrappers.over(arena) for arena in pool.page_arenas}

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        return FlashInferStep(arena, table, batch, self._wrappers[arena], self._workspace)

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + len(self._wrappers) * WRAPPER_BYTES


class _Mask(NamedTuple):
    """What all requests of a wrapper may see, in FlashInfer's terms."""

    causal: bool
    window_left: int


class _Terms(NamedTuple):
    """What a plan holds for beside its requests, known when queries come."""

    num_heads: int
    dtype: torch.dtype
    scale: float


class _Rows(NamedTuple):
    """Queries of a wrapper's requests, and where their partial results go."""

    q: Tensor  # [R, Hq, D]
    outs: Tensor  # [R, Hq, D] of the same type
    sums: Tensor  # [R, Hq] float32

    def part(self, start: int, end: int) -> "_Rows":
        return _Rows(self.q[start:end], self.outs[start:end], self.sums[start:end])


class RequestWrapper:
    """One of FlashInfer's wrappers, for requests of one mask over one arena. For one thread."""

    def __init__(self, arena: KvArena, mask: _Mask) -> None:
        self._arena = arena
        self._mask = mask
        self._device = arena.bytes.device
        unused = torch.empty(_UNUSED_BYTES, dtype=torch.uint8, device=self._device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(unused, kv_layout="HND", backend=_KERNELS)
        self._planned: tuple[PagedRequests, _Terms] | None = None
        self._copied = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self, requests: PagedRequests, terms: _Terms, rows: _Rows, pages: tuple[Tensor, Tensor]) -> None:
        """`pages`: K and V [P, H, S, D] of a layer."""
        planned = self._planned
        if planned is None or planned[0] is not requests or planned[1] != terms:
            self._plan(requests, terms)
        self._wrapper.run(rows.q, pages, out=rows.outs, lse=rows.sums, return_lse=True)

    def _plan(self, requests: PagedRequests, terms: _Terms) -> None:
        self._planned = None
        if self._copied is not None:  # plans are copied from one pinned buffer: the last one's must have been read
            self._copied.synchronize()
        group = self._arena.layout.group
        self._wrapper.plan(
            qo_indptr=on_host(requests.qo_indptr, self._device),
            paged_kv_indptr=on_host(requests.kv_indptr, self._device),
            paged_kv_indices=on_host(requests.kv_indices, self._device),
            paged_kv_last_page_len=on_host(requests.last_page_lens, self._device),
            num_qo_heads=terms.num_heads,
            num_kv_heads=self._arena.layout.num_heads,
            head_dim_qk=group.head_dim,
            page_size=self._arena.layout.page_size,
            causal=self._mask.causal,
            window_left=self._mask.window_left,
            sm_scale=terms.scale,
            q_data_type=terms.dtype,
            kv_data_type=torch_dtype(group.dtype),
            disable_split_kv=True,
        )
        if self._copied is not None:
            self._copied.record()
        self._planned = (requests, terms)


class _GroupWrappers(NamedTuple):
    """Wrappers of one page group, kept between steps. The group's steps share them, and plan again what another
    planned."""

    whole: RequestWrapper
    causal: RequestWrapper
    merge: PartialMerge

    @classmethod
    def over(cls, arena: KvArena) -> "_GroupWrappers":
        window_len = arena.layout.group.retention.window_len
        causal = _Mask(causal=True, window_left=-1 if window_len is None else window_len - 1)
        whole = _Mask(causal=False, window_left=-1)
        return cls(RequestWrapper(arena, whole), RequestWrapper(arena, causal), PartialMerge())


class FlashInferStep:
    """A step's attention over one arena, by FlashInfer's kernels."""

    def __init__(
        self, arena: KvArena, table: Table, batch: Batch, wrappers: _GroupWrappers, scratch: Workspace
    ) -> None:
        layout, device = arena.layout, arena.bytes.device
        self._arena = arena
        self._wrappers = wrappers
        self._scratch = scratch
        self._slots = write_slots(arena, table, batch)
        self._num_tokens = batch.num_tokens
        plan = plan_requests(batch, table, layout.page_size, layout.group.retention.window_len)
        self._whole, self._causal = plan.whole, plan.causal
        self._tokens = on_device(plan.tokens, device)
        self._order = on_device(plan.order, device)
        self._part_starts = on_device(plan.part_starts, device)

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Write the step's keys and values: planes [T, H, D] each."""
        self._arena.scatter_planes(layer, self._slots, planes)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, D]. Raises StateError for queries that are not of this step, or of a type that
        FlashInfer does not multiply with these pages."""
        self._check(q)
        out = q.new_empty(q.shape)
        if not self._num_tokens:
            return out
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            rows = self._rows(q)
            terms, pages = _Terms(q.shape[1], q.dtype, scale), self._pages(layer)
            num_whole = self._whole.num_rows
            if num_whole:
                self._wrappers.whole.run(self._whole, terms, rows.part(0, num_whole), pages)
            if self._causal.num_rows:
                self._wrappers.causal.run(self._causal, terms, rows.part(num_whole, len(rows.q)), pages)
            partial = PartialResults(rows.outs, rows.sums, self._part_starts, self._order)
            self._wrappers.merge(partial, sinks, out)
        return out

    def _check(self, q: Tensor) -> None:
        group = self._arena.layout.group
        if q.shape[0] != self._num_tokens or q.shape[2] != group.head_dim:
            raise StateError(f"queries of shape {tuple(q.shape)} in a step of {self._num_tokens} tokens")
        kept = torch_dtype(group.dtype)
        if q.dtype not in _QUERY_DTYPES or (group.dtype is not DType.FP8_E4M3 and q.dtype is not kept):
            raise StateError(f"FlashInfer multiplies no queries of {q.dtype} with pages of {kept}")

    def _rows(self, q: Tensor) -> _Rows:
        """Queries as the requests have them; a token's stands there once for each of its partial results."""
        shape = (len(self._tokens), *q.shape[1:])
        rows = torch.index_select(q, 0, self._tokens, out=self._scratch.take("rows", shape, q.dtype))
        outs = self._scratch.take("outs", shape, q.dtype)
        return _Rows(rows, outs, self._scratch.take("sums", shape[:2], torch.float32))

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [P, H, S, D], views of the arena."""
        layout = self._arena.layout
        elements = self._arena.bytes.view(torch_dtype(layout.group.dtype))
        planes = elements.view(self._arena.num_pages, *layout.page_shape)[:, :, layer]
        return planes[:, :, 0], planes[:, :, 1]


def open_attention(pages: PagesInUse) -> AttentionBackend:
    """The backend, once it has passed its self-test. Raises BackendUnavailable."""
    return open_kernels(KIND.name, FlashInferAttention, pages, IS_INTERPRETED)
