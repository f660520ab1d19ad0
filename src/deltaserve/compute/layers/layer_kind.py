"""What a decoder asks of a layer's two parts: the seam behind which each kind has its weights and mathematics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.collective.collective import Collective
from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.model.code_plan import CodeRules


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose hidden states are read: all that the last layer computes, besides what it keeps."""

    tokens: Tensor  # [N] int64
    attention: Sequence[StepAttention]
    """Attention of these tokens, one per page group as for the step; none where N is 0."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer finds its part of what a step brings."""

    group: int
    """Page group that holds its keys and values."""
    index: int
    """Index of the layer within that group; a recurrent layer's among those."""
    rope: int
    """Index of its rotary embedding among the distinct ones; of a recurrent layer: none."""


class Undecided(Protocol):
    """States of queries that end in guesses, before it is known which of those are right."""

    def settle(self, lens: Sequence[int], ops: StepOps) -> None:
        """Keep states as after the first `lens` tokens of each, one at least: the others were wrong."""
        ...


class SharedStep(Protocol):
    """What the recurrent layers of a step share."""

    @property
    def undecided(self) -> Undecided | None: ...


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a step brings to its layers, and what they compute with."""

    ops: StepOps
    collective: Collective
    norm_eps: float
    attention: Sequence[StepAttention]
    """Attention of all tokens, one per page group."""
    turns: Sequence[tuple[Tensor, Tensor]]  # cos, signed sin [T, 1, R] of each distinct rotary embedding
    shared: SharedStep | None


class MixerWeights(Protocol):
    """A layer's mixer on one rank."""

    def packed(self, rules: CodeRules) -> Self:
        """The same with its matrices laid out for products."""
        ...

    def begin(self, states: Sequence[StepStates], device: torch.device) -> SharedStep | None:
        """What layers of this kind share in a step, made once; `states`: one per state group. None: nothing."""
        ...

    def mix(self, x: Tensor, place: Place, step: LayerStep, last: LastTokens | None) -> Tensor | None:
        """x [T, hidden] -> of `last`, or of all tokens, [N, hidden], this rank's part of a sum; what is kept of all T
        is written. None: of no token."""
        ...


class MlpWeights(Protocol):
    """A layer's feed-forward part on one rank."""

    def packed(self, rules: CodeRules) -> Self:
        """The same with its matrices laid out for products."""
        ...

    def compute(self, x: Tensor, ops: StepOps, group: ExpertGroup | None) -> Tensor:
        """x [N, hidden] -> [N, hidden], this rank's part of a sum"""
        ...

    def accompany(self, nothing: Tensor, ops: StepOps, group: ExpertGroup) -> None:
        """What `compute` does of a member that has no tokens. nothing [0, hidden]"""
        ...
