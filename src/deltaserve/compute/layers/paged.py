"""What attention of all kinds has in common: what is kept of tokens is written to pages, then queries read those."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.layers.layer_kind import LastTokens, LayerStep, Meeting, Place, PreparedTokens


class Projected(NamedTuple):
    """What attention makes of a layer's inputs."""

    q: Tensor  # [T, Hq, D]
    planes: tuple[Tensor, ...]  # [T, Hkv, D] each: what is kept
    gate: Tensor | None = None  # [T, Hq, D] of its output


class PagedMixer(ABC):
    """Attention over pages."""

    __slots__ = ()

    @abstractmethod
    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], step: LayerStep) -> Projected:
        """x [T, inputs * hidden], rope: cos, signed sin [T, 1, R] -> queries, and what is kept"""

    @abstractmethod
    def attend(self, q: Tensor, attention: StepAttention, layer: int) -> Tensor:
        """Queries [N, Hq, D] over the pages, after those of the layer were written -> [N, Hq, Dv]"""

    @property
    @abstractmethod
    def attended_shape(self) -> tuple[int, int]:
        """Hq, Dv"""

    @abstractmethod
    def output(self, attended: Tensor, gate: Tensor | None, step: LayerStep) -> Tensor:
        """attended [N, Hq, Dv] -> [N, hidden], a sum over these heads"""

    def begin(self, states: Sequence[StepStates], device: torch.device) -> None:
        return None

    def prepare(self, x: Tensor, place: Place, step: LayerStep) -> PreparedTokens:
        q, planes, gate = self.project(x, step.turns[place.rope], step)
        return PreparedTokens((q, *planes), () if gate is None else (gate,))

    def meet(
        self, tokens: tuple[Tensor, ...], place: Place, meeting: Meeting, last: LastTokens | None
    ) -> Tensor | None:
        q, attention = tokens[0], meeting.attention
        attention[place.group].write_kv(place.index, *tokens[1:])
        if last is not None:
            if not last.attention:
                return None
            q, attention = q.index_select(0, last.tokens), last.attention
        return self.attend(q, attention[place.group], place.index)

    def room(self, num_tokens: int, like: Tensor) -> Tensor:
        return like.new_zeros(num_tokens, *self.attended_shape)

    def finish(self, met: Tensor, waiting: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        return self.output(met, waiting[0] if waiting else None, step)
