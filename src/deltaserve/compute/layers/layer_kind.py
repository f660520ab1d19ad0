"""What a decoder asks of a layer's two parts: the seam behind which each kind has its weights and mathematics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

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
    """What layers compute with of each of a step's tokens by itself."""

    ops: StepOps
    collective: Collective
    norm_eps: float
    turns: Sequence[tuple[Tensor, Tensor]]  # cos, signed sin [T, 1, R] of each distinct rotary embedding


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a step's tokens meet each other and those before them."""

    ops: StepOps
    attention: Sequence[StepAttention]
    """Attention of all tokens, one per page group."""
    shared: SharedStep | None


class PreparedTokens(NamedTuple):
    """What a mixer makes of each token by itself, before tokens meet."""

    meeting: tuple[Tensor, ...]  # [T, ..] each: what `meet` reads
    waiting: tuple[Tensor, ...] = ()  # [T, ..] each: what `finish` reads beside what came of the meeting


class MixerWeights(Protocol):
    """A layer's mixer on one rank, in three parts: in the second alone it matters what else is in a step, and what
    stands in pages and states. The others are functions of tensors, whose rows do not see each other."""

    def packed(self, rules: CodeRules) -> Self:
        """The same with its matrices laid out for products."""
        ...

    def begin(self, states: Sequence[StepStates], device: torch.device) -> SharedStep | None:
        """What layers of this kind share in a step, made once; `states`: one per state group. None: nothing."""
        ...

    def prepare(self, x: Tensor, place: Place, step: LayerStep) -> PreparedTokens:
        """x [T, inputs * hidden], the layer's normed input"""
        ...

    def meet(
        self, tokens: tuple[Tensor, ...], place: Place, meeting: Meeting, last: LastTokens | None
    ) -> Tensor | None:
        """`PreparedTokens.meeting` -> of `last`, or of all tokens, [N, ..]; what is kept of all T is written. None: of
        no token."""
        ...

    def room(self, num_tokens: int, like: Tensor) -> Tensor:
        """Zeros, as `meet` gives for so many tokens where its input is in the type of `like`, on whose device they
        are."""
        ...

    def finish(self, met: Tensor, waiting: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """What came of the meeting [N, ..], and `PreparedTokens.waiting` of those tokens -> [N, hidden], this rank's
        part of a sum"""
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
