"""Decode steps recorded once for each of a few numbers of rows, and replayed: one launch in place of hundreds.

A step of B rows is computed as one of the next larger number that is recorded. The rows that it does not have stand in
its products and norms, where rows do not see each other, but write no keys, values and states and see none. What
differs from step to step stands in the device's memory (resident_rows.py), and a step that draws advances it there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Shared
from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.attention.fixed_step import FixedStep, FixedStepBackend
from deltaserve.compute.executor.draws_choice import draws_on
from deltaserve.compute.executor.inputs import StepInputs
from deltaserve.compute.executor.recordable_models import why_not_recordable
from deltaserve.compute.executor.resident_draws import RowDraws
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import DrawKind
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.decoder import Decoder, Hidden
from deltaserve.core.ids import RowId

_log = logging.getLogger(__name__)
_FEW_ROWS = 8
"""Up to here numbers of rows are powers of two, from here multiples of this: little is computed in vain."""


def why_not_recorded(decoder: Decoder, attention: AttentionBackend) -> str | None:
    """The reason in words for an operator; None: steps can be recorded."""
    if decoder.shard.size > 1 or decoder.is_in_group:
        return "other workers or ranks take part in its steps"
    reason = why_not_recordable(decoder.spec)
    if reason is not None:
        return reason
    if decoder.counts_on_host:
        return "the rows of its experts are counted on the host"
    return None if isinstance(attention, FixedStepBackend) else "its attention backend has no such steps"


def bucket_of(num_rows: int, max_rows: int) -> int:
    """The number of rows that so many are computed as: 1, 2, 4, 8, 16, 24, 32, ..., `max_rows`."""
    few, many = 1 << (num_rows - 1).bit_length(), -(-num_rows // _FEW_ROWS) * _FEW_ROWS
    return min(max_rows, few if num_rows <= _FEW_ROWS else many)


class _RecordedStep:
    """A step of one number of rows, and what replays left."""

    def __init__(
        self, decoder: Decoder, rows: ResidentRows, bucket: int, attention: FixedStep, drawing: RowDraws | None
    ) -> None:
        """`drawing` None: nothing is drawn, and rows stay where they are."""
        self._decoder = decoder
        self._rows = rows
        self._on_device = rows.on_device(bucket)
        self._attention = attention
        self._drawing = drawing
        self.hidden: Hidden | None = None
        """Hidden states of B rows, as the last run or replay left them."""
        self.draws = torch.zeros((2, bucket), dtype=torch.int64, device=rows.positions.device)
        """[2, B]: tokens drawn, and 1 where the logits are finite."""

    def run(self) -> None:
        rows, lines = self._rows, self._on_device.lines
        self._attention.plan()
        positions = rows.positions.index_select(0, lines)
        tokens = rows.last_drawn.index_select(0, lines)
        attention, states = self._attention.attention, self._attention.states
        self.hidden = self._decoder.forward(tokens, positions, attention, None, states)
        if self._drawing is not None:
            self._drawing.draw(self._decoder.stored_logits(self.hidden.normed), lines, self.draws)


@dataclass(slots=True)
class _Bucket:
    """What is recorded for one number of rows."""

    attention: FixedStep
    replays: dict[DrawKind | None, tuple[_RecordedStep, Callable[[], None]]] = field(default_factory=dict)
    told: tuple[tuple[RowId, ...], tuple[Shared, ...]] = ((), ())
    """Rows, and what they read together, as `attention` knows them."""


class StepGraphs:
    """Recorded when a number of rows comes first, most of them before a worker is ready (warm_up.py). Steps that need
    more room than the recorded one has have it recorded again. For one thread."""

    def __init__(
        self,
        decoder: Decoder,
        attention: FixedStepBackend,
        rows: ResidentRows,
        max_rows: int,
        recorder: StepRecorder,
    ) -> None:
        """`max_rows`: of a recorded step."""
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._max_rows = max_rows
        self._recorder = recorder
        self._make_draws = draws_on(rows.positions.device)
        self._has_failed = False
        self._buckets: dict[int, _Bucket] = {}
        self._num_recorded = 0

    def take_recorded(self) -> int:
        """Steps recorded since this was asked last."""
        found, self._num_recorded = self._num_recorded, 0
        return found

    def forward(self, inputs: StepInputs) -> Hidden | None:
        """Hidden states of all tokens of the step, valid until the next one. None: it is none of those that are
        recorded."""
        num_rows = len(inputs.tokens)
        is_decoding = len(inputs.batch.queries) == num_rows and not inputs.batch.undecided
        if not is_decoding or len(inputs.wanted.tokens) != num_rows:
            return None
        unread = set(inputs.unread.places.tolist())
        rows = tuple(RowId(query.line) for query in inputs.batch.queries)
        given = {row: int(inputs.tokens[place]) for place, row in enumerate(rows) if place not in unread}
        step = DecodingRows(rows, inputs.positions, given, inputs.batch.shared, inputs.batch.split_tokens)
        found = self._replayed(step, None)
        if found is None or found.hidden is None:
            return None
        return Hidden(found.hidden.normed[:num_rows], found.hidden.residual[:num_rows], None)

    def draw(self, step: DecodingRows, kind: DrawKind) -> Tensor | None:
        """[2, n] int64, valid until the next step: tokens drawn, and 1 where the logits are finite. None: steps of so
        many rows are not recorded."""
        found = self._replayed(step, kind)
        if found is None:
            return None
        self._rows.advance()
        return found.draws[:, : len(step.rows)]

    def draw_again(self, before: DecodingRows, kind: DrawKind) -> Tensor | None:
        """As `draw`, of the rows of the last step that was drawn, each one position on from there, who read together
        what they read then."""
        ends, number = self._rows.go_on(), bucket_of(len(before.rows), self._max_rows)
        bucket = self._buckets.get(number)
        if bucket is None or not bucket.attention.holds(ends):
            return self.draw(replace(before, starts=ends - 1, given={}, adjusted=()), kind)
        recorded, replay = bucket.replays[kind]
        replay()
        self._rows.advance()
        return recorded.draws[:, : len(before.rows)]

    def shared_tokens(self, num_rows: int) -> int:
        """Positions that the last step, of so many rows, did not read again because of sharing."""
        return self._buckets[bucket_of(num_rows, self._max_rows)].attention.shared_tokens

    def _replayed(self, step: DecodingRows, kind: DrawKind | None) -> _RecordedStep | None:
        if self._has_failed or len(step.rows) > self._max_rows:
            return None
        self._rows.prepare(step)
        number = bucket_of(len(step.rows), self._max_rows)
        try:
            bucket = self._bucket(step, number)
            recorded, replay = bucket.replays.get(kind) or self._record(bucket, number, kind)
        except Exception as problem:  # a driver's, a library's: any of them leaves steps as they are without graphs
            reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            _log.warning("CUDA graphs: none from now on; to record a step of %d rows ends with %s", number, reason)
            self._has_failed = True
            self._buckets.clear()
            self._rows.free_scratch()
            return None
        replay()
        return recorded

    def _bucket(self, step: DecodingRows, number: int) -> _Bucket:
        """What is recorded for this number of rows, with the room that the step needs."""
        found, told = self._buckets.get(number), (step.rows, step.shared)
        if found is not None and found.attention.holds(step.starts + 1):
            if found.told == told or not (found.told[1] or step.shared):  # which rows share nothing is no matter
                return found
            if found.attention.share(step.to_come()):
                found.told = told
                return found
        made = _Bucket(self._attention.fixed_step(self._rows.on_device(number), step.to_come()), told=told)
        self._buckets[number] = made
        return made

    def _record(self, bucket: _Bucket, number: int, kind: DrawKind | None) -> tuple[_RecordedStep, Callable[[], None]]:
        """To record a step may compute it, and so may a recording that fails: rows stand behind it where they stood
        before."""
        rows = self._rows
        self._num_recorded += 1
        drawing = None if kind is None else self._make_draws(rows, number, self._decoder.spec.vocab_size, kind)
        recorded = _RecordedStep(self._decoder, rows, number, bucket.attention, drawing)
        with rows.standing():
            bucket.replays[kind] = recorded, self._recorder.record(recorded.run)
        _log.debug("CUDA graphs: a step of %d rows is recorded", number)
        return bucket.replays[kind]


def make_step_graphs(
    decoder: Decoder, attention: AttentionBackend, rows: ResidentRows, max_rows: int, recorder: StepRecorder | None
) -> StepGraphs | None:
    """StepGraphs of these parts. None: steps of this model, or on this device, are not recorded."""
    if recorder is None:
        return None
    reason = why_not_recorded(decoder, attention)
    if reason is not None or not isinstance(attention, FixedStepBackend):
        _log.info("CUDA graphs: none of this model's steps (%s)", reason)
        return None
    _log.info("CUDA graphs: of decode steps of up to %d rows, recorded when they come first", max_rows)
    return StepGraphs(decoder, attention, rows, max_rows, recorder)
