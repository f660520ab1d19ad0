"""The one decoder: composes layers as the ModelSpec says.

Each rank computes its heads, its part of the feed-forward layers and of the vocabulary; hidden states are whole on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.collective.collective import ALONE, Collective
from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.layer_kind import LastTokens, LayerStep, Meeting, Place, SharedStep, Undecided
from deltaserve.compute.layers.rope import Rope
from deltaserve.compute.layers.step_ops import Peaks, StepOps
from deltaserve.compute.layers.stretches import Layer, OwnStretches, Standing, Stretches
from deltaserve.compute.weights.weights import DecoderWeights
from deltaserve.core.layout.shard import Shard
from deltaserve.model.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Hidden:
    """What is read of a step's tokens."""

    normed: Tensor  # [N, hidden] after the final norm
    residual: Tensor  # [N, hidden] before it
    read: Tensor | None  # [T, layers * hidden]: what entered those layers that the draft reads
    undecided: Undecided | None = None
    """Present where queries end in guesses: their recurrent states wait for `Decoder.settle`."""


class Decoder:
    """Packed batches: a step is a flat list of tokens of all rows, one after the other; no padding."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: StepOps,
        collective: Collective = ALONE,
        group: ExpertGroup | None = None,
        num_logits: int | None = None,
    ) -> None:
        """`spec`: of the whole model; `weights`: of this rank. `group`: of workers that share their experts.
        `num_logits`: rows of the whole output matrix; None: of the vocabulary."""
        self.spec = spec
        self._num_logits = num_logits or spec.vocab_size
        self.local = spec.local(collective.shard)
        self._weights = weights
        self._ops = ops
        self._collective = collective
        self._group = group
        embedding = weights.embedding
        scale = spec.embedding_scale
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=embedding.dtype, device=embedding.device)
        turning = (layer.mixer.attention for layer in spec.layers)
        ropes = list(dict.fromkeys(attention.rope for attention in turning if attention is not None))
        self._ropes = tuple(Rope(rope, embedding.device) for rope in ropes)
        norms = [*(held.attention_norm for held in weights.layers[1:]), weights.norm]
        read = () if spec.draft is None else spec.draft.read_layers
        places = [
            Place(*spec.place(index), 0 if layer.mixer.attention is None else ropes.index(layer.mixer.attention.rope))
            for index, layer in enumerate(spec.layers)
        ]
        self._layers = tuple(
            Layer(held, places[index], norms[index], index in read) for index, held in enumerate(weights.layers)
        )

    @property
    def shard(self) -> Shard:
        return self._collective.shard

    @property
    def collective(self) -> Collective:
        return self._collective

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def is_in_group(self) -> bool:
        """Whether other workers take part in its steps."""
        return self._group is not None

    @property
    def counts_on_host(self) -> bool:
        """Whether its steps wait for the device to count the rows of experts."""
        return self.spec.num_experts > 0 and self._ops.grouped is None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Sequence[StepAttention],
        last: LastTokens | None = None,
        states: Sequence[StepStates] = (),
    ) -> Hidden:
        """tokens, positions [T] int64 -> what is read of `last`, or of all.

        `attention` holds one StepAttention per page group of the model's CacheSpec, `states` one StepStates per state
        group.
        """
        stretches = self.stretches(self.turns(positions, self._weights.embedding.dtype))
        return self.follow(stretches, stretches.begin(self.embed(tokens), None), attention, last, states)

    def compute(
        self,
        x: Tensor,
        normed: Tensor | None,
        positions: Tensor,
        attention: Sequence[StepAttention],
        last: LastTokens | None = None,
        states: Sequence[StepStates] = (),
    ) -> Hidden:
        """What `forward` computes, from the input of the first layer.

        x [T, hidden]; `normed` [T, attention_inputs * hidden], what its attention is computed from: None: the norm of x
        """
        stretches = self.stretches(self.turns(positions, x.dtype))
        return self.follow(stretches, stretches.begin(x, normed), attention, last, states)

    def turns(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Tables of each distinct rotary embedding for these positions [T]: see Rope.tables."""
        return [rope.tables(positions, dtype) for rope in self._ropes]

    def stretches(self, turns: Sequence[tuple[Tensor, Tensor]]) -> OwnStretches:
        """What is computed of tokens whose positions have these tables, each by itself."""
        step = LayerStep(self._ops, self._collective, self.spec.norm_eps, turns)
        return OwnStretches(self._layers, step, self._group)

    def follow(
        self,
        stretches: Stretches,
        standing: Standing,
        attention: Sequence[StepAttention],
        last: LastTokens | None,
        states: Sequence[StepStates],
    ) -> Hidden:
        """A step by its stretches, from `standing` behind the first one: between each two its tokens meet. What a
        stretch does not read is kept by nobody, so that it takes no memory beside the feed-forward part's."""
        meeting = Meeting(self._ops, attention, self._shared(states, self.device) if states else None)
        read = []
        for number, layer in enumerate(self._layers, start=1):
            if layer.is_read:
                read.append(standing.x)
            of_last = last if number == len(self._layers) else None
            met = layer.weights.attention.meet(standing.meeting, layer.place, meeting, of_last)
            if met is None:
                return self._unread(standing.x, read)
            if of_last is not None:
                standing = standing.part(of_last.tokens)
            standing = stretches.enter(number, met, standing)
            del met
            standing = stretches.go_on(number, standing)
        undecided = None if meeting.shared is None else meeting.shared.undecided
        return _hidden(standing.meeting[0], standing.x, read, undecided)

    def _shared(self, states: Sequence[StepStates], device: torch.device) -> SharedStep | None:
        """What recurrent layers share; those of a model are of one kind."""
        begun = (layer.weights.attention.begin(states, device) for layer in self._layers)
        return next((shared for shared in begun if shared is not None), None)

    def peaks(self, logits: Tensor) -> Peaks:
        """Whether each row of `logits` [N, V] is finite, and where it is largest."""
        return self._ops.peaks(logits)

    def _unread(self, x: Tensor, read: Sequence[Tensor]) -> Hidden:
        """Nobody reads any token of the step: what is left of its last layer is not computed."""
        self._compute_for_others(self._layers[-1])
        return _hidden(x, x, read)

    def hidden_memory(self, num_tokens: int) -> Hidden:
        """Memory, with any content, for what `forward` returns of so many tokens where nothing is undecided."""
        size, num_read = self.spec.hidden_size, sum(layer.is_read for layer in self._layers)
        new = self._weights.embedding.new_empty
        read = new((num_tokens, num_read * size)) if num_read else None
        return Hidden(new((num_tokens, size)), new((num_tokens, size)), read)

    def accompany(self) -> None:
        """A step of the other members of the expert group, in which this one has nothing to compute."""
        for layer in self._layers:
            self._compute_for_others(layer)

    def _compute_for_others(self, layer: Layer) -> None:
        if self._group is not None:
            nothing = self._weights.embedding.new_empty((0, self.spec.hidden_size))
            layer.weights.mlp.accompany(nothing, self._ops, self._group)

    def settle(self, hidden: Hidden, lens: Sequence[int]) -> None:
        """Keep states of queries that ended in guesses, as after the first `lens` tokens, one at least: the others
        were wrong."""
        if hidden.undecided is not None:
            hidden.undecided.settle(lens, self._ops)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, V] float32, of the whole vocabulary and nothing beside it, on every rank"""
        stored = self.stored_logits(hidden)
        return stored[:, : self._num_logits].contiguous().to(torch.float32)

    def stored_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, V or more] in the type of the weights, with the rows that fill up a share"""
        return self._collective.all_gather(self._ops.product(hidden, self._weights.lm_head))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens: [T] -> [T, hidden]."""
        x = self._look_up(tokens)
        return x if self._scale is None else x * self._scale

    def _look_up(self, tokens: Tensor) -> Tensor:
        shard, table = self._collective.shard, self._weights.embedding
        if shard.size == 1:
            return functional.embedding(tokens, table)
        lines = tokens - shard.rank * len(table)
        is_elsewhere = (lines < 0) | (lines >= len(table))
        found = functional.embedding(lines.masked_fill(is_elsewhere, 0), table)
        return self._collective.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))


def _hidden(normed: Tensor, residual: Tensor, read: Sequence[Tensor], undecided: Undecided | None = None) -> Hidden:
    return Hidden(normed, residual, torch.cat(tuple(read), -1) if read else None, undecided)
