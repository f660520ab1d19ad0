"""Decode steps that the device draws for, recorded once for each of a few numbers of rows, and replayed: one launch in
place of hundreds.

A step of B rows is computed as one of the next larger number that is recorded. The rows that it does not have stand in
its products and norms, where rows do not see each other, but write no keys, values and states and see none. What
differs from step to step stands in the device's memory (resident_rows.py), and a step advances it there. Steps that the
host draws for: given_graphs.py.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Shared
from deltaserve.compute.attention.fixed_step import FixedStep, FixedStepBackend
from deltaserve.compute.executor.draws_choice import draws_on
from deltaserve.compute.executor.recordings import RecordingFailed, Recordings, bucket_of
from deltaserve.compute.executor.resident_draws import RowDraws
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import DrawKind
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.core.ids import RowId

_log = logging.getLogger(__name__)


class _RecordedStep:
    """A step of one number of rows, and what replays left."""

    def __init__(
        self, decoder: Decoder, rows: ResidentRows, bucket: int, attention: FixedStep, drawing: RowDraws
    ) -> None:
        self._decoder = decoder
        self._rows = rows
        self._on_device = rows.on_device(bucket)
        self._attention = attention
        self._drawing = drawing
        self.draws = torch.zeros((2, bucket), dtype=torch.int64, device=rows.positions.device)
        """[2, B]: tokens drawn, and 1 where the logits are finite."""

    def run(self) -> None:
        rows, lines = self._rows, self._on_device.lines
        self._attention.plan()
        positions = rows.positions.index_select(0, lines)
        tokens = rows.last_drawn.index_select(0, lines)
        attention, states = self._attention.attention, self._attention.states
        hidden = self._decoder.forward(tokens, positions, attention, None, states)
        self._drawing.draw(self._decoder.stored_logits(hidden.normed), lines, self.draws)


@dataclass(slots=True)
class _Bucket:
    """What is recorded for one number of rows."""

    attention: FixedStep
    replays: dict[DrawKind, tuple[_RecordedStep, Callable[[], None]]] = field(default_factory=dict)
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
        recordings: Recordings,
    ) -> None:
        """`max_rows`: of a recorded step."""
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._max_rows = max_rows
        self._recordings = recordings
        self._make_draws = draws_on(rows.positions.device)
        self._buckets: dict[int, _Bucket] = {}

    def take_recorded(self) -> int:
        """See Recordings."""
        return self._recordings.take_recorded()

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
        if bucket is None or not bucket.attention.holds(ends, np.ones_like(ends)):
            return self.draw(replace(before, starts=ends - 1, given={}, adjusted=()), kind)
        recorded, replay = bucket.replays[kind]
        replay()
        self._rows.advance()
        return recorded.draws[:, : len(before.rows)]

    def shared_tokens(self, num_rows: int) -> int:
        """Positions that the last step, of so many rows, did not read again because of sharing."""
        return self._buckets[bucket_of(num_rows, self._max_rows)].attention.shared_tokens

    def _replayed(self, step: DecodingRows, kind: DrawKind) -> _RecordedStep | None:
        if self._recordings.has_failed:
            self._drop()
        if self._recordings.has_failed or len(step.rows) > self._max_rows:
            return None
        self._rows.prepare(step)
        number = bucket_of(len(step.rows), self._max_rows)
        try:
            recorded, replay = self._prepared(step, number, kind)
        except RecordingFailed:
            self._drop()
            return None
        replay()
        return recorded

    def _drop(self) -> None:
        self._buckets.clear()
        self._rows.free_scratch()

    def _prepared(self, step: DecodingRows, number: int, kind: DrawKind) -> tuple[_RecordedStep, Callable[[], None]]:
        bucket = self._bucket(step, number)
        return bucket.replays.get(kind) or self._record(bucket, number, kind)

    def _bucket(self, step: DecodingRows, number: int) -> _Bucket:
        """What is recorded for this number of rows, with the room that the step needs."""
        found, told = self._buckets.get(number), (step.rows, step.shared)
        if found is not None and found.attention.holds(step.starts + 1, np.ones_like(step.starts)):
            if found.told == told or not (found.told[1] or step.shared):  # which rows share nothing is no matter
                return found
            del self._buckets[number]  # where telling fails, what the device knows is not known
            if found.attention.share(step.to_come()):
                found.told = told
                self._buckets[number] = found
                return found
        make = partial(self._attention.fixed_step, self._rows.on_device(number), step.to_come())
        if found is not None:
            make = partial(found.attention.widened, step.to_come())
        made = _Bucket(self._recordings.attempt(_named(number), make), told=told)
        self._buckets[number] = made
        return made

    def _record(self, bucket: _Bucket, number: int, kind: DrawKind) -> tuple[_RecordedStep, Callable[[], None]]:
        """To record a step may compute it, and so may a recording that fails: rows stand behind it where they stood
        before."""
        rows = self._rows
        recorded = self._recordings.attempt(_named(number), partial(self._made, bucket, number, kind))
        with rows.standing():
            bucket.replays[kind] = recorded, self._recordings.record(_named(number), recorded.run)
        _log.debug("CUDA graphs: %s is recorded", _named(number))
        return bucket.replays[kind]

    def _made(self, bucket: _Bucket, number: int, kind: DrawKind) -> _RecordedStep:
        drawing = self._make_draws(self._rows, number, self._decoder.spec.vocab_size, kind)
        return _RecordedStep(self._decoder, self._rows, number, bucket.attention, drawing)


def _named(num_rows: int) -> str:
    return f"a step of {num_rows} rows"
