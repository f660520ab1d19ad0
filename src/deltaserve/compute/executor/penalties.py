"""Penalties of tokens that rows have had, in one arithmetic for draws by the host and by a device."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.sampling import SamplingParams


class TokenCounts(Protocol):
    """Which tokens a row has had, and how often it produced each."""

    @property
    def seen(self) -> Tensor:
        """[V] bool, prompt or output"""
        ...

    @property
    def output_counts(self) -> Tensor:
        """[V] float32"""
        ...


class Penalties(NamedTuple):
    """Those of B rows, float32 [B, 1], or [1] of one."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device) -> "Penalties":
        """Those of one row. On the device, since a GPU multiplies by the reciprocal of a number that the host gives it
        to divide by."""
        values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return cls(*torch.split(on_device(np.array(values, np.float32), device), 1))


def penalised(logits: Tensor, seen: Tensor, output_counts: Tensor, penalties: Penalties) -> Tensor:
    """logits, seen (bool), output_counts (float32) [B, V] or [V] -> logits of that shape."""
    return _less_for_each(_repeated(logits, seen, penalties.repetition), output_counts, penalties)


def penalised_row(line: Tensor, params: SamplingParams, history: TokenCounts) -> Tensor:
    """line [V] -> what `penalised` makes of it to the bit, without the division and the product where they would change
    nothing."""
    penalties = Penalties.of(params, line.device)
    if params.repetition_penalty != 1.0:
        line = _repeated(line, history.seen, penalties.repetition)
    return _less_for_each(line, history.output_counts, penalties)


def _repeated(logits: Tensor, seen: Tensor, repetition: Tensor) -> Tensor:
    return torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)


def _less_for_each(logits: Tensor, output_counts: Tensor, penalties: Penalties) -> Tensor:
    return logits - penalties.frequency * output_counts - penalties.presence * (output_counts > 0)
