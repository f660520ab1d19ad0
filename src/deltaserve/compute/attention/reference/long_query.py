"""Attention of one long query (an extend) over all its keys."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Query
from deltaserve.compute.attention.precision import may_round, rounded_products
from deltaserve.compute.attention.scratch_limits import CAUSAL_POSITIONS, MAX_KEYS, MAX_POSITIONS, SCORE_BYTES
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvArena
from deltaserve.compute.memory.page_table import Table
from deltaserve.compute.memory.workspace import Workspace

FUSED_POSITIONS = 256
"""Positions from which on, in 16 bits, torch's fused kernel is as fast as products that oneDNN computes (measured)."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Consecutive keys of the query."""

    kv_rows: Tensor  # [H * pages] int64, see KvArena.gather
    start: int
    """Position of the first key."""
    end: int
    skipped: int
    """Keys gathered before the first one."""

    def of(self, planes: tuple[Tensor, Tensor], start: int, end: int) -> tuple[Tensor, Tensor]:
        """Positions [start, end) of the two planes [H, keys, D]."""
        here = slice(start - self.start, end - self.start)
        return planes[0][:, here], planes[1][:, here]


@dataclass(frozen=True, slots=True)
class _Product:
    """Some positions of a block over the keys [start, end)."""

    positions: slice
    """Which positions of the block."""
    start: int
    end: int
    num_later: int
    """The last so many keys are those of the positions: each sees them up to its own."""
    num_left: int
    """The first so many keys have left the window of a position."""
    left_first: int
    """Where those begin, counted from the first key that any position would see if all were there."""


def _products_of(block: range, keys: _Keys, window_len: int | None) -> Iterator[_Product]:
    """Every position of the block over what it sees of the keys, as few at once as CAUSAL_POSITIONS."""
    stop = block.stop if window_len is None else min(block.stop, keys.end + window_len - 1)
    for first in range(block.start, stop, CAUSAL_POSITIONS):
        end = min(first + CAUSAL_POSITIONS, stop)
        num_later = end - first if keys.start == block.start else 0
        keys_end = end if num_later else keys.end
        here = slice(first - block.start, end - block.start)
        if window_len is None:
            yield _Product(here, keys.start, keys_end, num_later, 0, 0)
            continue
        seen_from = first - window_len + 1
        start = max(keys.start, seen_from)
        yield _Product(here, start, keys_end, num_later, max(0, end - window_len - start), start - seen_from)


class LongQuery:
    """Positions go in blocks, each over blocks of keys: those before it, then its own, which are causal.

    Results of blocks of keys are merged by their log-sum-exp, so memory does not grow with the context. Keys that have
    left the window of all positions of a block are not read.
    """

    def __init__(self, arena: KvArena, scratch: Workspace, table: Table, query: Query, first_token: int) -> None:
        """`first_token`: where the query's tokens start in the step."""
        self._arena = arena
        self._scratch = scratch
        self._line = table[query.line]
        self._query = query
        self._first_token = first_token
        self._window_len = arena.layout.group.retention.window_len
        size = min(CAUSAL_POSITIONS, query.q_len)
        square = torch.ones(size, size, dtype=torch.bool, device=arena.bytes.device)
        self._later = square.triu(1)  # [position, key]: the key comes after the position
        self._left = square.tril(-1)  # the key, counted from the first one's window, has left the position's window
        self._blocks = []
        for start in range(query.q_start, query.q_end, MAX_POSITIONS):
            end = min(start + MAX_POSITIONS, query.q_end)
            seen_from = 0 if self._window_len is None else max(0, start - self._window_len + 1)
            before = [self._keys(first, min(first + MAX_KEYS, start)) for first in range(seen_from, start, MAX_KEYS)]
            self._blocks.append((range(start, end), before, self._keys(start, end)))

    def _keys(self, start: int, end: int) -> _Keys:
        """The keys at positions [start, end)."""
        arena = self._arena
        size = arena.layout.page_size
        pages = self._line[start // size : -(-end // size)].astype(np.int64)
        heads = np.arange(arena.layout.num_heads)[:, None]
        rows = pages * arena.rows_per_page + heads * arena.rows_per_head  # [H, pages]
        return _Keys(on_device(rows.reshape(-1), arena.bytes.device), start, end, start % size)

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None, out: Tensor) -> None:
        """q [T, Hq, D], out [T, Hq, Dv]: fills this query's tokens of `out`."""
        rounds = may_round(q.dtype, self._query.q_end, q.shape[-1])
        shift = self._first_token - self._query.q_start
        with rounded_products() if rounds else nullcontext():
            for block, before, own in self._blocks:
                tokens = slice(block.start + shift, block.stop + shift)
                out[tokens] = self._attend_block(layer, q[tokens], scale, (block, before, own), sinks)

    def _attend_block(
        self, layer: int, q: Tensor, scale: float, block: tuple[range, list[_Keys], _Keys], sinks: Tensor | None
    ) -> Tensor:
        """q [C, Hq, D] -> [C, Hq, Dv] float32"""
        positions, before, own = block
        (length, num_heads, dim), heads = q.shape, self._arena.layout.num_heads
        shape = (heads, num_heads // heads, length, dim)  # [H, g, C, D]
        grouped = self._take("long_q", *shape).copy_(q.view(length, *shape[:2], dim).permute(1, 2, 0, 3))
        grouped.mul_(scale)
        value_dim = self._arena.layout.group.value_dim
        is_weighed = bool(before) or sinks is not None
        result = _Result(
            self._take("long_out", *shape[:3], value_dim), self._take("long_lse", *shape[:3]) if is_weighed else None
        )
        planes = self._gather(layer, own)
        for product in _products_of(positions, own, self._window_len):
            self._compute(grouped, own.of(planes, product.start, product.end), product, result.of(product.positions))
        is_fused = self._window_len is None and q.device.type == "cpu"
        is_fused = is_fused and (length >= FUSED_POSITIONS or q.dtype == torch.float32)
        for keys in before:
            planes = self._gather(layer, keys)
            if is_fused:
                result.merge(_fused(grouped, *planes, value_dim))
                continue
            for product in _products_of(positions, keys, self._window_len):
                size = (*shape[:2], product.positions.stop - product.positions.start)
                part = _Result(self._take("part_out", *size, value_dim), self._take("part_lse", *size))
                self._compute(grouped, keys.of(planes, product.start, product.end), product, part)
                result.of(product.positions).merge(part)
        if sinks is not None:
            result.weigh(sinks.view(*shape[:2], 1))
        return result.out.permute(2, 0, 1, 3).reshape(length, num_heads, -1)

    def _compute(self, queries: Tensor, planes: tuple[Tensor, Tensor], product: _Product, result: "_Result") -> None:
        """`queries` [H, g, C, D] of the block, planes [H, N, D]: the keys of the product."""
        q, k, v = queries[:, :, product.positions], planes[0], planes[1][..., : result.out.shape[-1]]
        (heads, group, length, dim), num_keys = q.shape, k.shape[1]
        step = max(1, SCORE_BYTES[q.device.type] // (4 * group * length * num_keys))
        for first in range(0, heads, step):
            some = slice(first, first + step)
            rows = q[some].reshape(-1, group * length, dim)  # [h, g * C, D]
            scores = self._take("scores", len(rows), group * length, num_keys)
            torch.bmm(rows, k[some].transpose(1, 2), out=scores)
            self._hide(scores.view(-1, group, length, num_keys), product)
            weights = torch.softmax(scores, -1, out=self._take("weights", *scores.shape))
            out = torch.bmm(weights, v[some], out=self._take("product", *rows.shape[:2], v.shape[-1]))
            result.out[some] = out.view(-1, group, length, v.shape[-1])
            if result.lse is not None:  # the largest weight is e^(top - lse)
                lse = scores.amax(-1).sub_(weights.amax(-1).log_())
                result.lse[some] = lse.view(-1, group, length)

    def _hide(self, scores: Tensor, product: _Product) -> None:
        """scores [h, g, C, N]"""
        length, num_keys = scores.shape[2:]
        if product.num_later:
            own = scores[..., num_keys - product.num_later :]
            own.masked_fill_(self._later[:length, : product.num_later], float("-inf"))
        if product.num_left:
            left = self._left[:length, product.left_first : product.left_first + product.num_left]
            scores[..., : product.num_left].masked_fill_(left, float("-inf"))

    def _gather(self, layer: int, keys: _Keys) -> tuple[Tensor, Tensor]:
        """The first and the last plane [H, keys, D] float32: K and V, or a latent that serves as both"""
        layout, planes = self._arena.layout, []
        for plane in range(layout.group.planes):
            out = self._take(f"long{plane}", len(keys.kv_rows), layout.page_size * layout.group.head_dim)
            self._arena.gather(layer, plane, keys.kv_rows, out, self._scratch)
            found = out.view(layout.num_heads, -1, layout.group.head_dim)
            planes.append(found[:, keys.skipped : keys.skipped + keys.end - keys.start])
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
        """Merge a result of the same positions over other keys: this becomes the result over both."""
        if self.lse is None or other.lse is None:
            raise ValueError("results without log-sum-exp cannot be merged")
        total = torch.logaddexp(self.lse, other.lse)
        self.out.mul_((self.lse - total).exp_()[..., None]).addcmul_(other.out, (other.lse - total).exp_()[..., None])
        self.lse.copy_(total)

    def weigh(self, sinks: Tensor) -> None:
        """sinks [H, g, 1]: one more key, with this score and no value."""
        if self.lse is None:
            raise ValueError("a result without log-sum-exp cannot be weighed")
        self.out.mul_((self.lse - sinks).sigmoid_()[..., None])


def _fused(q: Tensor, k: Tensor, v: Tensor, value_dim: int) -> _Result:
    """q [H, g, C, D] over all of k, v [H, N, D], by torch's own kernel: faster than products for many positions.

    It takes values that are as wide as keys only.
    """
    rows = q.view(1, q.shape[0], -1, q.shape[3])  # [1, H, g * C, D]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(rows, k[None], v[None], 0.0, False, scale=1.0)
    return _Result(out.reshape(q.shape)[..., :value_dim], lse.reshape(q.shape[:3]))
