"""FlashInfer's wrapper as its documentation has it, computed plainly in float32 from the very arrays that it is given:
in place of the package `flashinfer` where there is none, or no GPU.

Of each method the parameters that we use, by FlashInfer's names; test_flashinfer_attention.py compares them with those
of the package where it is installed. It refuses what FlashInfer does not say that it can.
"""

import math
import sys
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor


class PlanArguments(TypedDict):
    """Arguments of `plan` that we use."""

    qo_indptr: Tensor  # [N + 1] int32, as all arrays
    paged_kv_indptr: Tensor  # [N + 1]
    paged_kv_indices: Tensor
    paged_kv_last_page_len: Tensor  # [N]
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    page_size: int
    causal: bool
    window_left: int
    sm_scale: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    disable_split_kv: bool


class BatchPrefillWithPagedKVCacheWrapper:
    """Rows of queries over pages."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "HND"
        assert backend == "fa2"
        self._planned: PlanArguments | None = None
        self.num_plans = 0

    def plan(self, **given: Unpack[PlanArguments]) -> None:
        assert given.keys() == PlanArguments.__annotations__.keys()
        rows, pages, indices = given["qo_indptr"], given["paged_kv_indptr"], given["paged_kv_indices"]
        arrays = (rows, pages, indices, given["paged_kv_last_page_len"])
        assert all(array.dtype is torch.int32 and array.dim() == 1 and array.is_contiguous() for array in arrays)
        assert len(rows) == len(pages) == len(given["paged_kv_last_page_len"]) + 1
        assert rows[0] == pages[0] == 0
        assert len(indices) == pages[-1]
        assert given["q_data_type"] in (torch.float16, torch.bfloat16)
        assert given["kv_data_type"] in (given["q_data_type"], torch.float8_e4m3fn)
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        assert given["disable_split_kv"], "the float workspace is too small"
        self.num_plans += 1
        self._planned = given

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """q, out [R, Hq, D]; lse [R, Hq] float32; K and V [P, H, S, D]"""
        planned, (keys, values) = self._planned, paged_kv_cache
        assert planned is not None
        assert out is not None and lse is not None and return_lse
        shape = (int(planned["qo_indptr"][-1]), planned["num_qo_heads"], planned["head_dim_qk"])
        assert out.shape == q.shape == shape
        assert q.dtype is out.dtype is planned["q_data_type"]
        assert lse.shape == shape[:2] and lse.dtype is torch.float32
        assert q.stride(2) == 1 and out.is_contiguous() and lse.is_contiguous()
        assert keys.shape == values.shape
        assert keys.shape[1:] == (planned["num_kv_heads"], planned["page_size"], planned["head_dim_qk"])
        assert keys.dtype is values.dtype is planned["kv_data_type"]
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        for request, (start, end) in enumerate(pairwise(planned["qo_indptr"].tolist())):
            kv = _held(planned, request, keys), _held(planned, request, values)
            out[start:end], lse[start:end] = _attended(planned, q[start:end], *kv)
        return out, lse


def _held(planned: PlanArguments, request: int, plane: Tensor) -> Tensor:
    """[H, keys of the request, D] float32"""
    start, end = planned["paged_kv_indptr"][request : request + 2].tolist()
    page_size, last = planned["page_size"], int(planned["paged_kv_last_page_len"][request])
    assert start < end and 1 <= last <= page_size
    held = torch.cat([plane[page] for page in planned["paged_kv_indices"][start:end].tolist()], 1)
    return held[:, : (end - start - 1) * page_size + last].float()


def _attended(planned: PlanArguments, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D]; keys, values [H, m, D]"""
    num_rows, num_keys = len(q), keys.shape[1]
    assert num_rows > 0
    assert not planned["causal"] or num_keys >= num_rows
    group = planned["num_qo_heads"] // planned["num_kv_heads"]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("nhd,hmd->nhm", q.float(), keys) * planned["sm_scale"]
    key, last = torch.arange(num_keys), num_keys - num_rows + torch.arange(num_rows)[:, None]
    hidden = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    if planned["causal"]:
        hidden |= key > last
    if planned["window_left"] >= 0:
        hidden |= key < last - planned["window_left"]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    out = torch.einsum("nhm,hmd->nhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1) / math.log(2)


def stand_in() -> None:
    """Is `flashinfer` in this process from now on."""
    sys.modules["flashinfer"] = sys.modules[__name__]
