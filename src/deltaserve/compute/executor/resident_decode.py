"""Decode steps whose rows the device keeps: launched by one replay, with no input but what changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from deltaserve.compute.executor.inputs import shared_of, wants_more
from deltaserve.compute.executor.launched import DrawingItem, DrawsOnHost, Launched, StepClock, drawn_result
from deltaserve.compute.executor.resident_adjustments import AdjustedRow
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import DrawKind, WayToDraw, packed_rules
from deltaserve.compute.executor.row_state import DecodeRun, Row
from deltaserve.compute.executor.step_graphs import StepGraphs
from deltaserve.control.sched.plan import (
    DecodePart,
    PlanItem,
    RowOpen,
    SharedRun,
    StepPlan,
    StepResult,
    TokenOf,
)
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId


@dataclass(slots=True)
class _Run:
    """Steps of the same rows, one after the other."""

    rows: DecodingRows
    """Rows as the first step had them."""
    held: tuple[Row, ...]
    kind: DrawKind
    learning: tuple[int, ...]
    """Places of rows that learn what they draw: the host may have to draw for them by all that they had."""
    steps: DecodeRun
    num_steps: int
    work: tuple[SharedRun, ...]
    decode: DecodePart | None
    """As the last plan names its rows; None: it did not name all of them."""
    tokens_read: int
    """In the last step."""
    shared_tokens: int

    def end_of(self, place: int) -> int:
        """Position behind the last that the row at this place has computed."""
        return int(self.rows.starts[place]) + self.num_steps


class ResidentDecode:
    """Launches such steps. For one thread."""

    def __init__(self, graphs: StepGraphs, resident: ResidentRows, vocab_size: int, clock: StepClock) -> None:
        self._graphs = graphs
        self._resident = resident
        self._vocab_size = vocab_size
        self._clock = clock
        self._run: _Run | None = None

    def open(self, opened: RowOpen, row: Row) -> None:
        """Another request has the row."""
        if row.way is not None:
            rules = packed_rules(opened.sampling, opened.prompt_len, row.way, self._vocab_size)
            self._resident.open(opened.row, rules)

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether it is the next step of the rows of the last launch."""
        run = self._run
        if run is None or plan.decode is None or plan.opens or len(plan.items) != len(plan.decode):
            return False
        return plan.decode.continues(run.decode) and plan.work.shared is run.work

    def launch(self, plan: StepPlan, rows: Mapping[RowId, Row], launched_at: float) -> Launched | None:
        """The plan has been applied. None: it is no step of rows that each draw one token on the device, or none that
        is recorded. Raises whatever launching raises."""
        run = self._run
        if run is not None and self.goes_on(plan):
            run.decode = plan.decode
            run.tokens_read += len(run.held)
            draws = self._graphs.draw_again(run.rows, run.kind)
        else:
            self.end_run()
            run = self._run_of(plan, rows)
            draws = None if run is None else self._graphs.draw(run.rows, run.kind)
        if run is None or draws is None:
            self.end_run()
            return None
        if run is not self._run:
            self._begin(run)
        run.steps.step = plan.step
        run.num_steps += 1
        result = StepResult(
            step=plan.step,
            items=(),
            tokens_read=run.tokens_read,
            shared_tokens_read=run.shared_tokens,
            is_typical=not self._graphs.take_recorded(),
        )
        learning = [Learning(place, run.held[place], run.end_of(place)) for place in run.learning]
        return LaunchedRun(result, plan, DrawsOnHost.of(draws, draws.device), self._clock, launched_at, learning)

    def end_run(self) -> None:
        """What follows is another step than one more of the same rows."""
        run = self._run
        if run is not None:
            for row in run.held:
                row.leave(run.steps)
            for place in run.learning:
                run.held[place].num_counted = run.end_of(place)
            self._run = None

    def _begin(self, run: _Run) -> None:
        run.shared_tokens = self._graphs.shared_tokens(len(run.held))
        for row in run.held:
            row.join(run.steps)
        self._run = run

    def _run_of(self, plan: StepPlan, rows: Mapping[RowId, Row]) -> _Run | None:
        """Where each item is a row that draws one token by rules that the device knows."""
        drawing, adjusted, given, way = [], [], {}, WayToDraw.LARGEST
        for item in plan.items:
            row = rows[item.row]
            if row.way is None or item.q_len != 1 or not item.samples or wants_more(item):
                return None
            way = max(way, row.way)
            drawing.append(DrawingItem(item, row))
            if row.is_adjusted:
                adjusted.append(AdjustedRow(item.row, row, item.q_start))
            token = self._given(item, row)
            if token is not None:
                given[item.row] = token
        if not drawing:
            return None
        lines = tuple([one.item.row for one in drawing])
        starts = np.array([one.item.q_start for one in drawing], np.int64)
        shared = shared_of(lines, plan.work.shared)
        of_rows = DecodingRows(lines, starts, given, shared, plan.work.split_tokens, tuple(adjusted))
        return _Run(
            of_rows,
            held=tuple([one.row for one in drawing]),
            kind=DrawKind.of(way, bool(adjusted)),
            learning=tuple([place for place, one in enumerate(drawing) if one.row.sampling.needs_history]),
            steps=DecodeRun(plan.step),
            num_steps=0,
            work=plan.work.shared,
            decode=plan.decode if plan.num_going_on == len(lines) else None,
            tokens_read=int(starts.sum()) + len(lines),
            shared_tokens=0,
        )

    def _given(self, item: PlanItem, row: Row) -> int | None:
        """The input token, where it is not what the device drew for the row last."""
        if isinstance(item.inputs, TokenOf):
            return None if row.is_on_device(item.inputs.step) else row.drawn_in(item.inputs.step)
        token = int.from_bytes(item.inputs.tokens, "little")
        if not token < self._vocab_size:
            raise StateError(f"token {token} of row {item.row} is beyond the vocabulary of {self._vocab_size}")
        row.give(item.q_start, np.array([token], np.int64))
        return token


class Learning(NamedTuple):
    """A row that learns what it draws in a step of a run."""

    place: int
    row: Row
    position: int
    """Where the token drawn stands."""


class LaunchedRun(Launched):
    """A step of a run: only those rows learn of it that need to."""

    def __init__(
        self,
        result: StepResult,
        plan: StepPlan,
        draws: DrawsOnHost,
        clock: StepClock,
        launched_at: float,
        learning: Sequence[Learning],
    ) -> None:
        """`result`: without what is drawn."""
        Launched.__init__(self, result, (), draws, clock, launched_at)
        self._plan = plan
        self._learning = learning

    def settle(self) -> None:
        if not self._learning:
            return
        tokens, is_finite = self._on_host.values.tolist()
        for place, row, position in self._learning:
            row.read(self._of_step.step, position, tokens[place] if is_finite[place] else None)

    def _read(self, values: Tensor) -> StepResult:
        tokens, is_finite = values
        seconds, of_step, plan = self._clock.end(self._launched_at), self._of_step, self._plan
        if plan.num_going_on == len(tokens) and bool(is_finite.all()):
            return replace(of_step, decoded=tokens.numpy().astype("<u4").tobytes(), seconds=seconds)
        pairs = zip(plan.items, tokens.tolist(), is_finite.tolist(), strict=True)
        items = [drawn_result(item.row, token if ok else None) for item, token, ok in pairs]
        return replace(of_step, items=tuple(items), seconds=seconds)
