"""Steps that the host draws for, or for which it launches draws behind them, recorded once for each of a few numbers of
tokens, and replayed: of rows that compute their last token, and of rows that compute guesses behind it as well.

Their tokens stand one row after the other, as in any step, so rows with more guesses and with fewer are one recording.
Tokens that a step does not have write no keys and values and see none.
"""

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.attention.fixed_step import FixedStepBackend, RowsToCome
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.executor.given_rows import GivenStep
from deltaserve.compute.executor.inputs import StepInputs
from deltaserve.compute.executor.recordable_models import why_no_guesses
from deltaserve.compute.executor.recordings import RecordingFailed, Recordings, bucket_of
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.compute.memory.host_arrays import on_device

_log = logging.getLogger(__name__)


class _RecordedForward:
    """A step of one number of tokens, and what replays left."""

    def __init__(self, decoder: Decoder, step: GivenStep, hidden: Hidden) -> None:
        """`hidden`: of all tokens that there is room for, as each run or replay leaves them."""
        self._decoder = decoder
        self.step = step
        self.hidden = hidden
        self.replay: Callable[[], None] | None = None

    def run(self) -> None:
        step = self.step
        step.plan()
        found = self._decoder.forward(step.rows.tokens, step.rows.positions, step.attention, None, step.states)
        kept = self.hidden
        _keep(kept.normed, found.normed)
        _keep(kept.residual, found.residual)
        if found.read is not None and kept.read is not None:
            _keep(kept.read, found.read)


class GivenGraphs:
    """Recorded when a number of tokens comes first, and again where a step needs more room. For one thread."""

    def __init__(
        self,
        decoder: Decoder,
        attention: FixedStepBackend,
        resident: ResidentRows,
        max_tokens: int,
        recordings: Recordings,
    ) -> None:
        """`max_tokens`: of a recorded step. `resident`: keeps the page tables, and tokens that nobody has read."""
        self._decoder = decoder
        self._attention = attention
        self._resident = resident
        self._max_tokens = max_tokens
        self._recordings = recordings
        self._why_no_guesses = why_no_guesses(decoder.spec)
        self._told = set[str]()
        self._buckets: dict[int, _RecordedForward] = {}
        self._hidden: Hidden | None = None
        """The same memory for all of them: only one is computed at a time."""

    def forward(self, inputs: StepInputs) -> Hidden | None:
        """Hidden states of all tokens of the step, valid until anything else is replayed. None: it is none of those
        that are recorded."""
        num_tokens = inputs.batch.num_tokens
        if num_tokens > self._max_tokens or len(inputs.wanted.tokens) != num_tokens or not self._has(inputs.batch):
            return None
        if self._recordings.has_failed:
            self._drop()
            return None
        self._resident.tell_pages()
        try:
            replay, hidden = self._prepared(inputs, bucket_of(num_tokens, self._max_tokens))
        except RecordingFailed:
            self._drop()
            return None
        replay()
        return _first(hidden, num_tokens)

    def _drop(self) -> None:
        self._buckets.clear()
        self._hidden = None

    def _has(self, batch: Batch) -> bool:
        """Whether its rows compute no more than a token and guesses behind it."""
        if not batch.undecided:
            return batch.num_tokens == len(batch.queries)
        reason = self._why_no_guesses
        if reason is None and any(batch.queries[index].q_len > MAX_TILED_LEN for index in batch.undecided):
            reason = f"more than {MAX_TILED_LEN - 1} guesses of a request"
        if reason is not None:
            self._tell_once(reason)
            return False
        guessing = set(batch.undecided)
        return all(query.q_len == 1 or index in guessing for index, query in enumerate(batch.queries))

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            _log.info("CUDA graphs: none of steps that verify guesses (%s)", reason)
            self._told.add(reason)

    def _prepared(self, inputs: StepInputs, number: int) -> tuple[Callable[[], None], Hidden]:
        what, rows = f"a step of {number} tokens", RowsToCome.of(inputs.batch)
        found = self._buckets.get(number) or self._recordings.attempt(what, partial(self._made, number))
        self._buckets[number] = found
        step, unread = found.step, inputs.unread
        if not step.has_room(rows):
            found.replay = None
            self._recordings.attempt(what, partial(step.make_room, rows))
        step.rows.tell(rows, inputs.tokens)
        if len(unread.places):
            device = step.rows.tokens.device
            drawn = self._resident.last_drawn.index_select(0, on_device(unread.rows, device))
            step.rows.tokens.index_copy_(0, on_device(unread.places, device), drawn)
        if found.replay is None:
            with step.rows.standing():
                found.replay = self._recordings.record(what, found.run)
            _log.debug("CUDA graphs: %s is recorded", what)
        return found.replay, found.hidden

    def _made(self, number: int) -> _RecordedForward:
        if self._hidden is None:
            self._hidden = self._decoder.hidden_memory(self._max_tokens)
        step = GivenStep(self._resident, number, self._attention.fixed_step, self._attention.max_keys)
        return _RecordedForward(self._decoder, step, _first(self._hidden, number))


def _keep(kept: Tensor, made: Tensor) -> None:
    assert (kept.shape, kept.dtype) == (made.shape, made.dtype)
    kept.copy_(made)


def _first(hidden: Hidden, count: int) -> Hidden:
    read = None if hidden.read is None else hidden.read[:count]
    return Hidden(hidden.normed[:count], hidden.residual[:count], read)
