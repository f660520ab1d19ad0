"""A draft head: one layer that guesses the next token from a token and what the model made of the one before it.

What it keeps of a token lies at the token's own position, in pages of the model's: see `DraftSpec`. At position 0, and
where what the model made of the token before is not known, features are zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention
from deltaserve.compute.collective.collective import ALONE, Collective
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.weights import DecoderWeights, DraftWeights
from deltaserve.model.model_spec import DraftSpec, HeadForm


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a head makes of tokens."""

    normed: Tensor  # [N, hidden]: what its output matrix reads
    features: Tensor  # [N, hidden]: what it reads of these tokens to guess behind a further one


class DraftHead:
    """A draft head on one rank. Packed batches, as the Decoder's."""

    def __init__(self, spec: DraftSpec, weights: DecoderWeights, ops: StepOps, collective: Collective = ALONE) -> None:
        """`spec`: of the whole head; `weights`: of the model that it drafts for, on this rank, with the head's."""
        assert weights.draft is not None
        own = weights.draft
        embedding = weights.embedding if own.embedding is None else own.embedding
        lm_head = weights.lm_head if own.lm_head is None else own.lm_head
        body = DecoderWeights(embedding, (own.layer,), own.norm, lm_head)
        self._spec = spec
        self._weights: DraftWeights = own
        self._ops = ops
        self._dtype = embedding.dtype
        self._body = Decoder(spec.layer, body, ops, collective, num_logits=spec.num_guessable)
        self._targets: Tensor | None = None  # [guessable] int64: tokens of the model
        if own.guessable is not None:
            self._targets = own.guessable + torch.arange(len(own.guessable), device=own.guessable.device)

    @property
    def body(self) -> Decoder:
        """Its layer, as a model of one."""
        return self._body

    @property
    def feature_size(self) -> int:
        return self._spec.layer.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of the features."""
        return self._dtype

    @property
    def reads_all(self) -> bool:
        """Whether it reads the model's last hidden state of every token."""
        return self._spec.form is HeadForm.MERGED

    def features(self, hidden: Hidden) -> Tensor:
        """What the head reads of each of the model's tokens: [T, feature_size]"""
        if self._spec.form is HeadForm.MERGED:
            return hidden.normed
        assert hidden.read is not None
        return self._weights.merge.product(hidden.read, self._ops)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        features: Tensor,
        attention: StepAttention,
        last: LastTokens | None = None,
    ) -> Drafted:
        """tokens, positions [T] int64, features [T, feature_size] of the token before each -> of `last`, or of all.

        `attention`: of the draft's page group; that of `last` holds one of it alone.
        """
        ops, eps, own = self._ops, self._spec.layer.norm_eps, self._weights
        first_norm = own.layer.attention_norm if own.embedding_norm is None else own.embedding_norm
        embedded = ops.norm(self._body.embed(tokens), first_norm, eps)
        both = torch.cat((embedded, ops.norm(features, own.hidden_norm, eps)), -1)  # [T, 2 hidden]
        if self._spec.form is HeadForm.MERGED:
            hidden = self._body.compute(own.merge.product(both, ops), None, positions, (attention,), last)
            return Drafted(hidden.normed, hidden.normed)
        hidden = self._body.compute(features, both, positions, (attention,), last)
        return Drafted(hidden.normed, hidden.residual)

    def logits(self, normed: Tensor) -> Tensor:
        """[N, hidden] -> [N, tokens it chooses among] float32, on every rank"""
        return self._body.logits(normed)

    def guesses(self, normed: Tensor) -> Tensor:
        """[N, hidden] -> [N] int64: the most likely tokens of the model."""
        return self._tokens(self.logits(normed).argmax(-1))

    def weighed_guesses(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses as of `guesses`, and [N] float32: how likely the head holds each."""
        logits = self.logits(normed)
        most, best = logits.max(-1)
        return self._tokens(best), 1 / (logits - most[:, None]).exp_().sum(-1)

    def _tokens(self, chosen: Tensor) -> Tensor:
        return chosen if self._targets is None else self._targets.index_select(0, chosen)
