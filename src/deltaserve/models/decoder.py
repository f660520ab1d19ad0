"""The one decoder: composes layers as the ModelSpec says.

Each rank computes its heads, its part of the feed-forward layers and of the vocabulary; hidden states are whole on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.device.attention import StepAttention
from deltaserve.layout.shard import Shard
from deltaserve.models.collective import ALONE, Collective
from deltaserve.models.gqa import attend, project
from deltaserve.models.layers import dense_mlp, product, rms_norm
from deltaserve.models.mla import attend_latents, project_latents
from deltaserve.models.model_spec import ModelSpec
from deltaserve.models.moe import moe_mlp
from deltaserve.models.rope import Rope
from deltaserve.models.weights import AttentionWeights, DecoderWeights, DenseWeights, MlaWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose hidden states are read: all that the last layer computes, besides K and V of all."""

    tokens: Tensor  # [N] int64
    attention: Sequence[StepAttention]
    """Of these tokens, one per page group as for the step; none where N is 0."""


class Decoder:
    """Packed batches: a step is a flat list of tokens of all rows, one after the other; no padding."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, collective: Collective = ALONE) -> None:
        """`spec`: of the whole model; `weights`: of this rank."""
        self.spec = spec
        self.local = spec.local(collective.shard)
        self._weights = weights
        self._collective = collective
        self._rope = Rope(spec.rope, weights.embedding.device)

    @property
    def shard(self) -> Shard:
        return self._collective.shard

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Sequence[StepAttention], last: LastTokens | None = None
    ) -> Tensor:
        """tokens, positions [T] int64 -> hidden states after the final norm [N, hidden], of `last` or of all.

        `attention` holds one StepAttention per page group of the model's CacheSpec.
        """
        weights, eps, add_up = self._weights, self.spec.norm_eps, self._collective.all_reduce
        final = len(weights.layers) - 1
        x = self._embed(tokens)  # [T, hidden]
        rope = self._rope.tables(positions, x.dtype)
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.attention_norm, eps)
            q, *planes = self._project(normed, layer.attention, rope)
            attention[0].write_kv(index, *planes)
            step = attention
            if last is not None and index == final:
                x, q, step = x.index_select(0, last.tokens), q.index_select(0, last.tokens), last.attention
                if not step:
                    return x  # nobody reads any of them
            x = x + add_up(self._attend(q, layer.attention, step[0], index))
            x = x + add_up(self._mlp(rms_norm(x, layer.mlp_norm, eps), layer.mlp))
        return rms_norm(x, weights.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, V] float32, of the whole vocabulary on every rank"""
        return self._collective.all_gather(product(hidden, self._weights.lm_head)).to(torch.float32)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, hidden]"""
        shard, table = self._collective.shard, self._weights.embedding
        if shard.size == 1:
            return functional.embedding(tokens, table)
        lines = tokens - shard.rank * len(table)
        is_elsewhere = (lines < 0) | (lines >= len(table))
        found = functional.embedding(lines.masked_fill(is_elsewhere, 0), table)
        return self._collective.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))

    def _project(
        self, x: Tensor, weights: AttentionWeights | MlaWeights, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Queries [T, Hq, D], and what is kept: a tensor [T, Hkv, D] for each plane of the page group."""
        if isinstance(weights, MlaWeights):
            return project_latents(x, weights, self.local, rope)
        return project(x, weights, self.local, rope, self._collective)

    def _attend(
        self, q: Tensor, weights: AttentionWeights | MlaWeights, attention: StepAttention, layer: int
    ) -> Tensor:
        """This rank's part of a sum."""
        if isinstance(weights, MlaWeights):
            return attend_latents(q, weights, self.local, attention, layer)
        return attend(q, weights, self.local, attention, layer)

    def _mlp(self, x: Tensor, weights: DenseWeights | MoeWeights) -> Tensor:
        """This rank's part of a sum."""
        if isinstance(weights, DenseWeights):
            return dense_mlp(x, weights)
        assert self.local.moe is not None
        return moe_mlp(x, weights, self.local.moe)
