"""Decode steps recorded once for each of a few numbers of rows, and replayed: one launch in place of hundreds.

A step of B rows is computed as one of the next larger number that is recorded. The rows that it does not have stand in
its products and norms, where rows do not see each other, but write no keys and values and see none. Drawing stays
outside, for it differs with what rows ask for.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import AttentionBackend
from deltaserve.compute.attention.fixed_step import FixedStep, FixedStepBackend
from deltaserve.compute.executor.inputs import StepInputs
from deltaserve.compute.executor.recordable_models import why_not_recordable
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.compute.memory.host_arrays import on_device, write_over

_log = logging.getLogger(__name__)
_FEW_ROWS = 8
"""Up to here numbers of rows are powers of two, from here multiples of this: little is computed in vain."""


def why_not_recorded(decoder: Decoder, attention: AttentionBackend) -> str | None:
    """The reason in words for an operator; None: steps can be recorded."""
    if decoder.shard.size > 1 or decoder.is_in_group:
        return "other workers or ranks take part in its steps"
    reason = why_not_recordable(decoder.spec)
    return (
        "its attention backend has no such steps"
        if reason is None and not isinstance(attention, FixedStepBackend)
        else reason
    )


def bucket_of(num_rows: int, max_rows: int) -> int:
    """The number of rows that so many are computed as: 1, 2, 4, 8, 16, 24, 32, ..., `max_rows`."""
    few, many = 1 << (num_rows - 1).bit_length(), -(-num_rows // _FEW_ROWS) * _FEW_ROWS
    return min(max_rows, few if num_rows <= _FEW_ROWS else many)


@dataclass(slots=True)
class _RecordedStep:
    """A step of one number of rows. What differs from step to step is in `inputs` and in the buffers of `step`."""

    decoder: Decoder
    step: FixedStep
    inputs: Tensor  # [4, B] int64: see _packed
    last_drawn: Tensor  # [rows] int64
    hidden: Hidden | None = None
    """Hidden states of B rows, as the last run or replay left them."""

    def run(self) -> None:
        tokens, positions, rows, is_unread = self.inputs
        tokens = torch.where(is_unread.bool(), self.last_drawn.index_select(0, rows), tokens)
        self.hidden = self.decoder.forward(tokens, positions, self.step.attention)


_Recorded = tuple[_RecordedStep, Callable[[], None]]
"""A recorded step, with what replays it."""


class StepGraphs:
    """Recorded when a number of rows is seen first: starting takes no longer, what is never needed takes no memory, and
    steps that need more room than the recorded one has have it recorded again by the same means. For one thread."""

    def __init__(
        self, decoder: Decoder, attention: FixedStepBackend, last_drawn: Tensor, max_rows: int, recorder: StepRecorder
    ) -> None:
        """`last_drawn` [rows] int64: what rows drew that the host has not read. `max_rows`: of a recorded step."""
        self._decoder = decoder
        self._attention = attention
        self._last_drawn = last_drawn
        self._max_rows = max_rows
        self._recorder = recorder
        self._has_failed = False
        self._recorded: dict[int, _Recorded] = {}
        """Number of rows |-> the step that was recorded for it."""

    def forward(self, inputs: StepInputs) -> Hidden | None:
        """Hidden states of all tokens of the step, valid until the next one. None: it is none of those that are
        recorded."""
        if self._has_failed or not self._fits(inputs):
            return None
        num_rows = len(inputs.tokens)
        bucket = bucket_of(num_rows, self._max_rows)
        found = self._filled(inputs, bucket) or self._record(inputs, bucket)
        if found is None:
            return None
        recorded, replay = found
        replay()
        assert recorded.hidden is not None
        return Hidden(recorded.hidden.normed[:num_rows], recorded.hidden.residual[:num_rows], None)

    def _fits(self, inputs: StepInputs) -> bool:
        num_rows = len(inputs.tokens)
        is_decoding = len(inputs.batch.queries) == num_rows and not inputs.batch.undecided
        return is_decoding and num_rows <= self._max_rows and len(inputs.wanted.tokens) == num_rows

    def _filled(self, inputs: StepInputs, bucket: int) -> _Recorded | None:
        """A recorded step filled with the inputs; None: no step that was recorded has room for it."""
        found = self._recorded.get(bucket)
        if found is None or not found[0].step.fill(inputs.batch):
            return None
        write_over(found[0].inputs, _packed(inputs, bucket))
        return found

    def _record(self, inputs: StepInputs, bucket: int) -> _Recorded | None:
        """Record a step; None: it cannot be, and no step is from now on."""
        try:
            found = _RecordedStep(
                decoder=self._decoder,
                step=self._attention.fixed_step(inputs.batch, bucket),
                inputs=on_device(_packed(inputs, bucket), self._last_drawn.device),
                last_drawn=self._last_drawn,
            )
            self._recorded[bucket] = found, self._recorder.record(found.run)
        except Exception as problem:  # a driver's, a library's: any of them leaves steps as they are without graphs
            reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            _log.warning("CUDA graphs: none from now on; to record a step of %d rows ends with %s", bucket, reason)
            self._has_failed = True
            self._recorded.clear()
            return None
        _log.debug("CUDA graphs: a step of %d rows is recorded", bucket)
        return self._recorded[bucket]


def make_step_graphs(
    decoder: Decoder, attention: AttentionBackend, last_drawn: Tensor, max_rows: int, recorder: StepRecorder | None
) -> StepGraphs | None:
    """StepGraphs of these parts. None: steps of this model, or on this device, are not recorded."""
    if recorder is None:
        return None
    reason = why_not_recorded(decoder, attention)
    if reason is not None or not isinstance(attention, FixedStepBackend):
        _log.info("CUDA graphs: none of this model's steps (%s)", reason)
        return None
    _log.info("CUDA graphs: of decode steps of up to %d rows, recorded when they come first", max_rows)
    return StepGraphs(decoder, attention, last_drawn, max_rows, recorder)


def _packed(inputs: StepInputs, num_rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[4, B] tokens, positions, rows of `last_drawn`, 1 where a token is read from there. Rows that the step does not
    have are token 0 at position 0."""
    packed = np.zeros((4, num_rows), np.int64)
    packed[0, : len(inputs.tokens)] = inputs.tokens
    packed[1, : len(inputs.tokens)] = inputs.positions
    packed[2, inputs.unread.places] = inputs.unread.rows
    packed[3, inputs.unread.places] = 1
    return packed
