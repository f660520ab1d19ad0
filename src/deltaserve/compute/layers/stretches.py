"""What a decoder computes of a step's tokens each by itself: stretches between the places where tokens meet.

Stretch 0 leads from embeddings to the first layer's attention, stretch i from behind that of layer i - 1 to that of
layer i, the last one to the final norm. They are functions of tensors whose rows do not see each other: computed one
after the other here, recorded and replayed in executor/step_pieces.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.layer_kind import LayerStep, Place
from deltaserve.compute.weights.weights import LayerWeights


class Standing(NamedTuple):
    """A step's tokens behind a stretch."""

    x: Tensor  # [T, hidden], the residual stream
    meeting: tuple[Tensor, ...]
    """[T, ..] each: what they meet with in the next layer; behind the last one their normed hidden states alone."""
    waiting: tuple[Tensor, ...] = ()
    """[T, ..] each: what the next stretch reads beside what comes of that."""

    def part(self, tokens: Tensor) -> "Standing":
        """What the next stretch reads of `tokens` [N]."""
        waiting = tuple(tensor.index_select(0, tokens) for tensor in self.waiting)
        return Standing(self.x.index_select(0, tokens), (), waiting)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, and what it has to do with its neighbours."""

    weights: LayerWeights
    place: Place
    next_norm: Tensor
    """Weight of the norm of what it leaves: the next layer's first norm, or the last one of all."""
    is_read: bool
    """What enters it is read by the draft."""


class Stretches(Protocol):
    """The stretches of one step."""

    def enter(self, number: int, met: Tensor, before: Standing) -> Standing:
        """What `go_on` reads for stretch `number`, from 1 to the number of layers. `met`: what came of the meeting of
        the layer before, of all tokens or, in the last stretch, of a part, and `before` of the same. Neither is read
        later, so that nobody has to keep them while the feed-forward part takes its memory."""
        ...

    def go_on(self, number: int, entered: Standing) -> Standing:
        """Stretch `number`."""
        ...


@dataclass(frozen=True, slots=True)
class OwnStretches:
    """Computes them when it is asked."""

    layers: Sequence[Layer]
    step: LayerStep
    group: ExpertGroup | None

    def begin(self, x: Tensor, normed: Tensor | None) -> Standing:
        """Stretch 0. x [T, hidden]; `normed` [T, attention_inputs * hidden], None: the norm of x"""
        if normed is None:
            normed = self.step.ops.norm(x, self.layers[0].weights.attention_norm, self.step.norm_eps)
        return self._prepared(0, x, normed)

    def enter(self, number: int, met: Tensor, before: Standing) -> Standing:
        """Behind the mixer: the residual stream, and what the feed-forward part reads."""
        held, step = self.layers[number - 1].weights, self.step
        mixed = step.collective.all_reduce(held.attention.finish(met, before.waiting, step))
        x, normed = step.ops.add_norm(before.x, mixed, held.after_attention, held.mlp_norm, step.norm_eps)
        return Standing(x, (normed,))

    def go_on(self, number: int, entered: Standing) -> Standing:
        layer, step = self.layers[number - 1], self.step
        added = step.collective.all_reduce(layer.weights.mlp.compute(entered.meeting[0], step.ops, self.group))
        x, normed = step.ops.add_norm(entered.x, added, layer.weights.after_mlp, layer.next_norm, step.norm_eps)
        return self._prepared(number, x, normed)

    def room(self, number: int, num_tokens: int, like: Tensor) -> Tensor:
        """Zeros, for what stretch `number` reads of the meeting of so many tokens: see MixerWeights.room."""
        return self.layers[number - 1].weights.attention.room(num_tokens, like)

    def _prepared(self, number: int, x: Tensor, normed: Tensor) -> Standing:
        if number == len(self.layers):
            return Standing(x, (normed,))
        layer = self.layers[number]
        return Standing(x, *layer.weights.attention.prepare(normed, layer.place, self.step))
