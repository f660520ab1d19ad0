"""All that is recorded of an executor's steps, and why of some models nothing is."""

import logging

from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.attention.fixed_step import FixedStepBackend
from deltaserve.compute.executor.given_graphs import GivenGraphs
from deltaserve.compute.executor.head_graphs import HeadGraphs
from deltaserve.compute.executor.head_passes import Passes
from deltaserve.compute.executor.recordable_models import why_not_recordable
from deltaserve.compute.executor.recordings import Recordings
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.step_graphs import StepGraphs
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.layers.draft_head import DraftHead

_log = logging.getLogger(__name__)


def why_not_recorded(decoder: Decoder) -> str | None:
    """The reason in words for an operator; None: what its layers compute can be recorded."""
    if decoder.shard.size > 1 or decoder.is_in_group:
        return "other workers or ranks take part in its steps"
    reason = why_not_recordable(decoder.spec)
    if reason is not None:
        return reason
    return "the rows of its experts are counted on the host" if decoder.counts_on_host else None


class RecordedSteps:
    """What is recorded of a model's steps, and of its draft head's passes."""

    def __init__(
        self,
        decoder: Decoder,
        attention: FixedStepBackend,
        resident: ResidentRows,
        most: tuple[int, int],
        recorder: StepRecorder,
    ) -> None:
        """`most`: rows of a recorded step that the device draws for, and tokens of another."""
        max_rows, self._max_tokens = most
        self._attention = attention
        self._resident = resident
        self.recordings = Recordings(recorder)
        self.drawing = StepGraphs(decoder, attention, resident, max_rows, self.recordings)
        """Steps that the device draws for."""
        self.given = GivenGraphs(decoder, attention, resident, self._max_tokens, self.recordings)
        """Steps that the host draws for."""

    def passes(self, head: DraftHead, group: int, others: Passes) -> Passes:
        """Passes of a head over pages of this group; `others`: compute those that are not recorded."""
        reason = why_not_recorded(head.body)
        if reason is not None:
            _log.info("CUDA graphs: none of the draft head's passes (%s)", reason)
            return others
        pages = self._attention, group, self._resident
        return HeadGraphs(head, pages, self._max_tokens, self.recordings, others)


def make_recorded_steps(
    decoder: Decoder,
    attention: AttentionBackend,
    resident: ResidentRows,
    most: tuple[int, int],
    recorder: StepRecorder | None,
) -> RecordedSteps | None:
    """RecordedSteps of these parts. None: steps of this model, or on this device, are not recorded."""
    if recorder is None:
        return None
    reason = why_not_recorded(decoder)
    if reason is not None:
        _log.info("CUDA graphs: none of this model's steps (%s)", reason)
        return None
    if not isinstance(attention, FixedStepBackend):
        _log.info("CUDA graphs: none of decode steps (its attention backend has no such steps)")
        return None
    text = "CUDA graphs: of decode steps of up to %d rows, or %d tokens with guesses, recorded when they come first"
    _log.info(text, *most)
    return RecordedSteps(decoder, attention, resident, most, recorder)
