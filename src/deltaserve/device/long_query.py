"""Attention of one long query (an extend) over all its keys."""

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from deltaserve.device.attention import Query
from deltaserve.device.kv_pool import KvArena
from deltaserve.device.page_table import Table
from deltaserve.device.precision import may_round, rounded_products
from deltaserve.device.workspace import Workspace

_K, _V = 0, 1
_CPU_SCORE_BYTES = 8 << 20
_CUDA_SCORE_BYTES = 256 << 20
_MAX_POSITIONS = 128
"""Of one block: its scores above the diagonal are computed in vain."""


class LongQuery:
    """Positions go in blocks; each block is two products and one softmax in float32, GQA heads as further rows."""

    def __init__(self, arena: KvArena, scratch: Workspace, table: Table, query: Query, first_token: int) -> None:
        """`first_token`: where the query's tokens start in the step."""
        self._arena = arena
        self._scratch = scratch
        self._query = query
        self._first_token = first_token
        pages = table[query.line, : -(-query.q_end // arena.layout.page_size)].astype(np.int64)
        heads = np.arange(arena.layout.num_heads)[:, None]
        rows = pages * arena.rows_per_page + heads * arena.rows_per_head  # [H, pages]
        device = arena.bytes.device
        self._kv_rows = torch.from_numpy(rows.reshape(-1)).to(device)  # [H * pages]
        size = min(_MAX_POSITIONS, query.q_len)
        self._later = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)  # key after the query

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor) -> None:
        """q, out [T, Hq, D]: fills this query's tokens of `out`."""
        k, v = self._gather(layer, _K), self._gather(layer, _V)  # [H, positions, D]
        query, (_, num_heads, dim) = self._query, q.shape
        group = num_heads // len(k)
        budget = (_CPU_SCORE_BYTES if q.device.type == "cpu" else _CUDA_SCORE_BYTES) // (4 * group * query.q_end)
        step = min(_MAX_POSITIONS, query.q_len, max(1, budget))
        heads = max(1, budget // step)
        rounds = may_round(q.dtype, query.q_end, dim)
        with rounded_products() if rounds else nullcontext():
            for start in range(0, query.q_len, step):
                end = min(start + step, query.q_len)
                tokens = slice(self._first_token + start, self._first_token + end)
                seen = slice(0, query.q_start + end)
                for head in range(0, len(k), heads):
                    kv = slice(head, head + heads)
                    own = slice(head * group, (head + heads) * group)
                    out[tokens, own] = self._attend_block(q[tokens, own], k[kv, seen], v[kv, seen], scale)

    def _attend_block(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [C, Hq, D]: the last C positions of k, v [H, N, D] float32 -> [C, Hq, D] float32"""
        (length, num_heads, dim), (heads, num_keys, _) = q.shape, k.shape
        shape = (heads, num_heads // heads, length)
        rows = (
            self._take("long_q", *shape, dim).copy_(q.reshape(length, *shape[:2], dim).permute(1, 2, 0, 3)).mul_(scale)
        )
        scores = self._take("scores", *shape, num_keys)  # [H, g, C, N]
        torch.bmm(rows.view(heads, -1, dim), k.transpose(1, 2), out=scores.view(heads, -1, num_keys))
        scores[..., num_keys - length :].masked_fill_(self._later[:length, :length], float("-inf"))
        weights = torch.softmax(scores, -1, out=self._take("weights", *scores.shape))
        result = torch.bmm(weights.view(heads, -1, num_keys), v, out=rows.view(heads, -1, dim))
        return result.view(*shape, dim).permute(2, 0, 1, 3).reshape(q.shape)

    def _gather(self, layer: int, plane: int) -> Tensor:
        """[H, positions, D] float32"""
        layout = self._arena.layout
        out = self._take(f"long{plane}", len(self._kv_rows), layout.page_size * layout.group.head_dim)
        self._arena.gather(layer, plane, self._kv_rows, out, self._scratch)
        return out.view(layout.num_heads, -1, layout.group.head_dim)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._scratch.take(name, shape, torch.float32)
