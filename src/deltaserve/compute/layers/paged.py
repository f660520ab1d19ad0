"""What attention of all kinds has in common: what is kept of tokens is written to pages, then queries read those."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.layers.layer_kind import LastTokens, LayerStep, Place
from deltaserve.compute.layers.step_ops import StepOps


class Projected(NamedTuple):
    """What attention makes of a layer's inputs."""

    q: Tensor  # [T, Hq, D]
    planes: tuple[Tensor, ...]  # [T, Hkv, D] each: what is kept
    gate: Tensor | None = None  # [T, Hq, D] of its output

    def part(self, tokens: Tensor) -> "Projected":
        """The projections of `tokens` [N], as far as they are not kept in pages."""
        gate = None if self.gate is None else self.gate.index_select(0, tokens)
        return Projected(self.q.index_select(0, tokens), (), gate)


class PagedMixer(ABC):
    """Attention over pages."""

    __slots__ = ()

    @abstractmethod
    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], step: LayerStep) -> Projected:
        """x [T, inputs * hidden], rope: cos, signed sin [T, 1, R] -> queries, and what is kept"""

    @abstractmethod
    def attend(self, projected: Projected, attention: StepAttention, layer: int, ops: StepOps) -> Tensor:
        """N tokens over the pages, after those of the layer were written -> [N, hidden], a sum over these heads"""

    def begin(self, states: Sequence[StepStates], device: torch.device) -> None:
        return None

    def mix(self, x: Tensor, place: Place, step: LayerStep, last: LastTokens | None) -> Tensor | None:
        projected, attention = self.project(x, step.turns[place.rope], step), step.attention
        attention[place.group].write_kv(place.index, *projected.planes)
        if last is not None:
            projected, attention = projected.part(last.tokens), last.attention
            if not attention:
                return None
        return self.attend(projected, attention[place.group], place.index, step.ops)
