"""Attention of all short queries of a step, tile by tile. See tiles.py for the partition."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.precision import may_round, rounded_products
from deltaserve.compute.attention.reference.blocks import Block, PartTable, Pass, make_blocks
from deltaserve.compute.attention.tiles import TilePlan
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.kv_pool import KvArena
from deltaserve.compute.memory.workspace import Workspace


class TiledQueries:
    """All short queries of a step. Every tensor is laid out once, for all layers: a view costs as much as a product."""

    def __init__(self, arena: KvArena, plan: TilePlan, group_size: int, scratch: Workspace) -> None:
        device, group = arena.bytes.device, arena.layout.group
        self.tokens = on_device(plan.tokens, device)  # [Tt]
        table = PartTable.of(plan, arena.layout.num_heads * group_size)
        self._parts = parts = _Parts(
            scratch.take("queries", (table.num_tokens * table.num_heads + 1, group.head_dim), torch.float32),
            scratch.take("outs", (table.empty + 1, group.value_dim), torch.float32),
            scratch.take("lses", (table.empty + 1,), torch.float32),
        )
        self._queries = parts.queries[:-1].view(len(self.tokens), -1, group.head_dim)  # [Tt, Hq, D]
        self._merges = _merges(table, device)
        blocks = make_blocks(plan, arena, table)
        self._blocks = [_BlockRun(arena, block, parts, scratch) for block in blocks]

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """q [Tt, Hq, D] -> [Tt, Hq, Dv] float32"""
        self._parts.begin(sinks)
        self._queries.copy_(q).mul_(scale)
        for block in self._blocks:  # each by itself: which there are follows from the step's other queries
            with rounded_products() if may_round(q.dtype, block.width, q.shape[-1]) else nullcontext():
                block.run(layer)
        out = self._parts.outs.new_empty(len(self._parts.queries) - 1, self._parts.outs.shape[1])
        for merge in self._merges:
            merge.run(self._parts, out)
        return out.view(*q.shape[:-1], -1)


class _Parts:
    """What tiles read and write. The last query row is zero; see PartTable for the results."""

    def __init__(self, queries: Tensor, outs: Tensor, lses: Tensor) -> None:
        self.queries = queries  # [Rq + 1, D]
        self.outs = outs  # [P + 2, Dv]
        self.lses = lses  # [P + 2] natural log
        self.sinks: Tensor | None = None  # [Hq] float32, of the layer
        self._has_several = len(outs) > len(queries) + 1

    @property
    def are_merged(self) -> bool:
        """Whether a result is weighed by its log-sum-exp."""
        return self._has_several or self.sinks is not None

    def begin(self, sinks: Tensor | None) -> None:
        """The rest is written before it is read; another step may have used the same memory since."""
        self.sinks = sinks
        self.queries[-1] = 0.0
        self.outs[-1] = 0.0
        self.lses[-1] = float("-inf")


@dataclass(frozen=True, slots=True)
class _Merge:
    """Query rows with about equally many parts: their results are added up together."""

    rows: Tensor  # [n] int64
    places: Tensor  # [n * M] int64 into the parts, the empty one where a row has fewer than M

    def run(self, parts: _Parts, out: Tensor) -> None:
        """out [Rq, Dv]: fills `rows`."""
        shape = (len(self.rows), -1, out.shape[1])  # [n, M, Dv]
        outs = parts.outs.index_select(0, self.places).view(shape)
        if outs.shape[1] == 1 and parts.sinks is None:
            out.index_copy_(0, self.rows, outs[:, 0])
            return
        lses = parts.lses.index_select(0, self.places).view(len(self.rows), 1, -1)
        if parts.sinks is None:
            weights = lses.softmax(-1)
        else:  # a part that adds nothing but its weight
            sinks = parts.sinks.index_select(0, self.rows % len(parts.sinks))
            weights = torch.cat((lses, sinks.view(-1, 1, 1)), -1).softmax(-1)[..., :-1]
        out.index_copy_(0, self.rows, torch.bmm(weights, outs)[:, 0])


def _merges(table: PartTable, device: torch.device) -> list[_Merge]:
    """Rows with 1, 2, 3 to 4, 5 to 8, ... parts: all of them are given as many as the most could have."""
    counts = table.counts[:-1]
    sizes = np.array([(count - 1).bit_length() for count in counts.tolist()])
    heads = np.arange(table.num_heads)[:, None]  # [Hq, 1]
    merges = []
    for size in np.unique(sizes):
        tokens = np.flatnonzero(sizes == size)[:, None, None]  # [t, 1, 1]
        places = table.place_in_order(tokens, heads, np.arange(1 << size))  # [t, Hq, M]
        rows = tokens[:, :, 0] * table.num_heads + heads[:, 0]
        merges.append(_Merge(*(on_device(values.reshape(-1), device) for values in (rows, places))))
    return merges


class _BlockRun:
    """A block with its tensors."""

    def __init__(self, arena: KvArena, block: Block, parts: _Parts, scratch: Workspace) -> None:
        layout, group = arena.layout, arena.layout.group
        self.width = block.width
        """Keys per item."""
        self._arena = arena
        self._scratch = scratch
        self._kv_rows, self._stale = block.kv_rows, block.stale
        shape = (len(block.kv_rows), layout.page_size * group.head_dim)
        self._planes = [scratch.take(f"plane{index}", shape, torch.float32) for index in range(group.planes)]
        items = (-1, block.width, group.head_dim)  # [items * H, width, D]
        k, v = self._planes[0].view(items), self._planes[-1].view(items)[..., : group.value_dim]
        self._tokens = self._planes[-1].view(-1, group.head_dim)
        self._passes = [_PassRun(tiles, k, v, block.hidden, layout.num_heads, parts, scratch) for tiles in block.passes]

    def run(self, layer: int) -> None:
        for plane, out in enumerate(self._planes):
            self._arena.gather(layer, plane, self._kv_rows, out, self._scratch)
        if self._stale is not None:  # 0 * NaN is NaN: hidden keys must not only weigh nothing
            self._tokens.index_fill_(0, self._stale, 0.0)
        for tiles in self._passes:
            tiles.run()


class _PassRun:
    """A pass with its tensors."""

    def __init__(
        self, tiles: Pass, k: Tensor, v: Tensor, hidden: Tensor | None, heads: int, parts: _Parts, scratch: Workspace
    ) -> None:
        """k [items * H, width, D], v [.., Dv] of the block, hidden [items, 1, R, n]"""
        num, width, dim = sum(tiles.counts) * heads, *k.shape[1:]
        self._rows, self._targets, self._parts, self._hidden = tiles.queries, tiles.targets, parts, hidden
        self._q = scratch.take("tile", (len(tiles.queries), dim), torch.float32)
        self._out = scratch.take("out", (len(tiles.queries), v.shape[-1]), torch.float32)
        q, out = self._q.view(num, -1, dim), self._out.view(num, -1, v.shape[-1])  # [n * H, R, D or Dv]
        shape = (num, q.shape[1], width)
        self._scores, self._weights = (scratch.take(name, shape, torch.float32) for name in ("scores", "weights"))
        num_hidden = 0 if hidden is None else hidden.shape[-1]
        self._last_scores = self._scores.view(-1, heads, *shape[1:])[..., width - num_hidden :]
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
            self._last_scores.masked_fill_(self._hidden, float("-inf"))
        torch.softmax(self._scores, -1, out=self._weights)
        for weights, values, out in self._value_products:
            torch.bmm(weights, values, out=out)
        parts.outs.index_copy_(0, self._targets, self._out)
        if parts.are_merged:
            # The largest weight is e^(top - lse).
            lse = self._scores.amax(-1).sub_(self._weights.amax(-1).log_())
            parts.lses.index_copy_(0, self._targets, lse.view(-1))


def _multiply_keys(q: Tensor, keys: Tensor, out: Tensor) -> None:
    """q [b, R, D], keys [b, D, width] -> out [b, R, width]"""
    if keys.shape[2] == 1:  # bmm changes its kernel with the batch size here, and so the bits
        torch.sum(q * keys.transpose(1, 2), -1, keepdim=True, out=out)
    else:
        torch.bmm(q, keys, out=out)
