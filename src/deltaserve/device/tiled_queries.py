"""Attention of all short queries of a step, tile by tile. See tiles.py for the partition."""

from contextlib import nullcontext
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from deltaserve.device.blocks import Block, Pass, make_blocks
from deltaserve.device.kv_pool import KvArena
from deltaserve.device.precision import may_round, rounded_products
from deltaserve.device.tiles import TilePlan
from deltaserve.device.workspace import Workspace

_K, _V = 0, 1


class TiledQueries:
    """All short queries of a step. Every tensor is laid out once, for all layers: a view costs as much as a product."""

    def __init__(self, arena: KvArena, plan: TilePlan, group_size: int, scratch: Workspace) -> None:
        device, dim = arena.bytes.device, arena.layout.group.head_dim
        self.tokens = torch.from_numpy(plan.tokens).to(device)  # [Tt]
        num_parts = plan.max_splits + 1
        num_rows = plan.padding * arena.layout.num_heads
        parts = _Parts(
            scratch.take("queries", (num_rows + 1, dim), torch.float32).zero_(),
            scratch.take("outs", (num_rows * num_parts + 1, dim), torch.float32).zero_(),
            scratch.take("lses", (num_rows * num_parts + 1,), torch.float32).fill_(float("-inf")),
        )
        self._queries = parts.queries[:-1].view(len(self.tokens), -1, dim)  # [Tt, Hq, D]
        self._outs = parts.outs[:-1].view(num_rows, num_parts, dim)
        self._lses = parts.lses[:-1].view(num_rows, 1, num_parts)
        blocks = make_blocks(plan, arena, group_size)
        self._split_keys = blocks[0].width  # splits stand first and have one width
        self._blocks = [_BlockRun(arena, block, parts, scratch) for block in blocks]

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [Tt, Hq, D] -> [Tt, Hq, D] float32"""
        self._queries.copy_(q).mul_(scale)
        with rounded_products() if may_round(q.dtype, self._split_keys, q.shape[-1]) else nullcontext():
            for block in self._blocks:
                block.run(layer)
        if self._outs.shape[1] == 1:
            return self._outs.clone().view(q.shape)
        return torch.bmm(self._lses.softmax(-1), self._outs).view(q.shape)


class _Parts:
    """What tiles read and write.

    The last query row stays zero, the last result is waste. Results a query does not have keep weight e^-inf = 0 and
    value 0.
    """

    def __init__(self, queries: Tensor, outs: Tensor, lses: Tensor) -> None:
        self.queries = queries  # [Rq + 1, D]
        self.outs = outs  # [Rq * M + 1, D]
        self.lses = lses  # [Rq * M + 1] natural log
        self.merged = len(outs) > len(queries)


class _BlockRun:
    """A block with its tensors."""

    def __init__(self, arena: KvArena, block: Block, parts: _Parts, scratch: Workspace) -> None:
        layout = arena.layout
        self._arena = arena
        self._scratch = scratch
        self._kv_rows, self._stale = block.kv_rows, block.stale
        shape = (len(block.kv_rows), layout.page_size * layout.group.head_dim)
        self._k, self._v = (scratch.take(name, shape, torch.float32) for name in ("keys", "values"))
        items = (-1, block.width, layout.group.head_dim)  # [items * H, width, D]
        k, v = self._k.view(items), self._v.view(items)
        self._tokens = v.view(-1, v.shape[-1])
        self._passes = [_PassRun(tiles, k, v, block.hidden, layout.num_heads, parts, scratch) for tiles in block.passes]

    def run(self, layer: int) -> None:
        self._arena.gather(layer, _K, self._kv_rows, self._k, self._scratch)
        self._arena.gather(layer, _V, self._kv_rows, self._v, self._scratch)
        if self._stale is not None:  # 0 * NaN is NaN: hidden keys must not only weigh nothing
            self._tokens.index_fill_(0, self._stale, 0.0)
        for tiles in self._passes:
            tiles.run()


class _PassRun:
    """A pass with its tensors."""

    def __init__(
        self, tiles: Pass, k: Tensor, v: Tensor, hidden: Tensor | None, heads: int, parts: _Parts, scratch: Workspace
    ) -> None:
        """k, v [items * H, width, D] of the block, hidden [items, 1, R, width]"""
        num, width, dim = sum(tiles.counts) * heads, *k.shape[1:]
        self._rows, self._targets, self._parts, self._hidden = tiles.queries, tiles.targets, parts, hidden
        self._q = scratch.take("tile", (len(tiles.queries), dim), torch.float32)
        self._out = scratch.take("out", (len(tiles.queries), dim), torch.float32)
        q, out = self._q.view(num, -1, dim), self._out.view(num, -1, dim)  # [n * H, R, D]
        shape = (num, q.shape[1], width)
        self._scores, self._weights = (scratch.take(name, shape, torch.float32) for name in ("scores", "weights"))
        self._by_item = self._scores.view(-1, heads, *shape[1:])
        self._key_products, self._value_products = [], []
        for start, end in pairwise(accumulate((count * heads for count in tiles.counts), initial=0)):
            keys, values = k[: end - start].transpose(1, 2), v[: end - start]
            self._key_products.append((q[start:end], keys, self._scores[start:end]))
            self._value_products.append((self._weights[start:end], values, out[start:end]))

    def run(self) -> None:
        parts = self._parts
        torch.index_select(parts.queries, 0, self._rows, out=self._q)
        for q, keys, scores in self._key_products:
            _multiply_keys(q, keys, scores)
        if self._hidden is not None:
            self._by_item.masked_fill_(self._hidden, float("-inf"))
        torch.softmax(self._scores, -1, out=self._weights)
        for weights, values, out in self._value_products:
            torch.bmm(weights, values, out=out)
        parts.outs.index_copy_(0, self._targets, self._out)
        if parts.merged:
            # The largest weight is e^(top - lse).
            lse = self._scores.amax(-1).sub_(self._weights.amax(-1).log_())
            parts.lses.index_copy_(0, self._targets, lse.view(-1))


def _multiply_keys(q: Tensor, keys: Tensor, out: Tensor) -> None:
    """q [b, R, D], keys [b, D, width] -> out [b, R, width]"""
    if keys.shape[2] == 1:  # bmm changes its kernel with the batch size here, and so the bits
        torch.sum(q * keys.transpose(1, 2), -1, keepdim=True, out=out)
    else:
        torch.bmm(q, keys, out=out)
