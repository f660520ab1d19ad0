"""Attention of one long query (an extend) over all its keys."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.device.attention import Query
from deltaserve.device.kv_pool import KvArena
from deltaserve.device.page_table import Table
from deltaserve.device.precision import may_round, rounded_products
from deltaserve.device.scratch_limits import CAUSAL_POSITIONS, MAX_KEYS, MAX_POSITIONS, SCORE_BYTES
from deltaserve.device.workspace import Workspace

FUSED_POSITIONS = 256
"""From here on, for models in 16 bits, torch's fused kernel is as fast as products that oneDNN computes (measured)."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Consecutive keys of the query."""

    kv_rows: Tensor  # [H * pages] int64, see KvArena.gather
    first: int
    """Of the gathered keys, those from here on."""
    length: int


class LongQuery:
    """Positions go in blocks, each over blocks of keys: those before it, then its own, which are causal.

    Results of blocks of keys are merged by their log-sum-exp, so memory does not grow with the context.
    """

    def __init__(self, arena: KvArena, scratch: Workspace, table: Table, query: Query, first_token: int) -> None:
        """`first_token`: where the query's tokens start in the step."""
        self._arena = arena
        self._scratch = scratch
        self._line = table[query.line]
        self._query = query
        size = min(CAUSAL_POSITIONS, query.q_len)
        self._later = torch.ones(size, size, dtype=torch.bool, device=arena.bytes.device).triu(1)  # key after the query
        self._blocks = []
        for start in range(query.q_start, query.q_end, MAX_POSITIONS):
            end = min(start + MAX_POSITIONS, query.q_end)
            before = [self._keys(first, min(first + MAX_KEYS, start)) for first in range(0, start, MAX_KEYS)]
            tokens = slice(first_token + start - query.q_start, first_token + end - query.q_start)
            self._blocks.append((tokens, before, self._keys(start, end)))

    def _keys(self, start: int, end: int) -> _Keys:
        """Positions [start, end)."""
        arena = self._arena
        size = arena.layout.page_size
        pages = self._line[start // size : -(-end // size)].astype(np.int64)
        heads = np.arange(arena.layout.num_heads)[:, None]
        rows = pages * arena.rows_per_page + heads * arena.rows_per_head  # [H, pages]
        return _Keys(torch.from_numpy(rows.reshape(-1)).to(arena.bytes.device), start % size, end - start)

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor) -> None:
        """q [T, Hq, D], out [T, Hq, Dv]: fills this query's tokens of `out`."""
        rounds = may_round(q.dtype, self._query.q_end, q.shape[-1])
        with rounded_products() if rounds else nullcontext():
            for tokens, before, own in self._blocks:
                out[tokens] = self._attend_block(layer, q[tokens], before, own, scale)

    def _attend_block(self, layer: int, q: Tensor, before: list[_Keys], own: _Keys, scale: float) -> Tensor:
        """q [C, Hq, D] -> [C, Hq, Dv] float32"""
        (length, num_heads, dim), heads = q.shape, self._arena.layout.num_heads
        shape = (heads, num_heads // heads, length, dim)  # [H, g, C, D]
        grouped = self._take("long_q", *shape).copy_(q.view(length, *shape[:2], dim).permute(1, 2, 0, 3))
        grouped.mul_(scale)
        value_dim = self._arena.layout.group.value_dim
        result = _Result(
            self._take("long_out", *shape[:3], value_dim), self._take("long_lse", *shape[:3]) if before else None
        )
        k, v = self._gather(layer, own)
        for start in range(0, length, CAUSAL_POSITIONS):
            end = min(start + CAUSAL_POSITIONS, length)
            here = slice(start, end)
            self._products(grouped[:, :, here], k[:, :end], v[:, :end, :value_dim], end - start, result.of(here))
        is_fused = q.device.type == "cpu" and (length >= FUSED_POSITIONS or q.dtype == torch.float32)
        for keys in before:
            k, v = self._gather(layer, keys)
            if is_fused:
                result.merge(_fused(grouped, k, v, value_dim))
                continue
            for start in range(0, length, CAUSAL_POSITIONS):
                here = slice(start, min(start + CAUSAL_POSITIONS, length))
                size = (*shape[:2], here.stop - here.start)
                part = _Result(self._take("part_out", *size, value_dim), self._take("part_lse", *size))
                self._products(grouped[:, :, here], k, v[..., :value_dim], 0, part)
                result.of(here).merge(part)
        return result.out.permute(2, 0, 1, 3).reshape(length, num_heads, -1)

    def _products(self, q: Tensor, k: Tensor, v: Tensor, num_causal: int, result: "_Result") -> None:
        """q [H, g, C, D] over k [H, N, D], v [H, N, Dv]; the last `num_causal` keys are those of the C positions."""
        (heads, group, length, dim), num_keys = q.shape, k.shape[1]
        step = max(1, SCORE_BYTES[q.device.type] // (4 * group * length * num_keys))
        for first in range(0, heads, step):
            some = slice(first, first + step)
            rows = q[some].reshape(-1, group * length, dim)  # [h, g * C, D]
            scores = self._take("scores", len(rows), group * length, num_keys)
            torch.bmm(rows, k[some].transpose(1, 2), out=scores)
            if num_causal:
                own = scores.view(-1, group, length, num_keys)[..., num_keys - num_causal :]
                own.masked_fill_(self._later[:length, :num_causal], float("-inf"))
            weights = torch.softmax(scores, -1, out=self._take("weights", *scores.shape))
            out = torch.bmm(weights, v[some], out=self._take("product", *rows.shape[:2], v.shape[-1]))
            result.out[some] = out.view(-1, group, length, v.shape[-1])
            if result.lse is not None:  # the largest weight is e^(top - lse)
                lse = scores.amax(-1).sub_(weights.amax(-1).log_())
                result.lse[some] = lse.view(-1, group, length)

    def _gather(self, layer: int, keys: _Keys) -> tuple[Tensor, Tensor]:
        """The first and the last plane [H, keys, D] float32: K and V, or a latent that serves as both"""
        layout, planes = self._arena.layout, []
        for plane in range(layout.group.planes):
            out = self._take(f"long{plane}", len(keys.kv_rows), layout.page_size * layout.group.head_dim)
            self._arena.gather(layer, plane, keys.kv_rows, out, self._scratch)
            found = out.view(layout.num_heads, -1, layout.group.head_dim)
            planes.append(found[:, keys.first : keys.first + keys.length])
        return planes[0], planes[-1]

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._scratch.take(name, shape, torch.float32)


@dataclass(frozen=True, slots=True)
class _Result:
    """Attention of some positions over some keys."""

    out: Tensor  # [H, g, C, Dv]
    lse: Tensor | None  # [H, g, C] log-sum-exp of the scores; None where nothing is merged

    def of(self, positions: slice) -> "_Result":
        return _Result(self.out[:, :, positions], None if self.lse is None else self.lse[:, :, positions])

    def merge(self, other: "_Result") -> None:
        """Of the same positions over other keys: this becomes the result over both."""
        if self.lse is None or other.lse is None:
            raise ValueError("results without log-sum-exp cannot be merged")
        total = torch.logaddexp(self.lse, other.lse)
        self.out.mul_((self.lse - total).exp_()[..., None]).addcmul_(other.out, (other.lse - total).exp_()[..., None])
        self.lse.copy_(total)


def _fused(q: Tensor, k: Tensor, v: Tensor, value_dim: int) -> _Result:
    """q [H, g, C, D] over all of k, v [H, N, D], by torch's own kernel: faster than products for many positions.

    It takes values that are as wide as keys only.
    """
    rows = q.view(1, q.shape[0], -1, q.shape[3])  # [1, H, g * C, D]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(rows, k[None], v[None], 0.0, False, scale=1.0)
    return _Result(out.reshape(q.shape)[..., :value_dim], lse.reshape(q.shape[:3]))
