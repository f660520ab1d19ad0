"""Decode steps whose rows the device keeps: launched by one replay, with no input but what changed."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from deltaserve.compute.attention.attention import Shared
from deltaserve.compute.executor.launched import DrawingItem
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import WayToDraw, packed_rules
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.step_graphs import StepGraphs
from deltaserve.control.sched.plan import PlanItem, RowOpen, SharedRun, StepPlan, TokenOf
from deltaserve.core.errors import StateError
from deltaserve.core.ids import RowId


class ResidentDecode:
    """For one thread."""

    def __init__(self, graphs: StepGraphs, resident: ResidentRows, vocab_size: int) -> None:
        self._graphs = graphs
        self._resident = resident
        self._vocab_size = vocab_size
        self._runs: tuple[tuple[RowId, ...], tuple[SharedRun, ...], tuple[Shared, ...]] = ((), (), ())
        """Rows and runs of the last plan, and these runs by places of rows in the step."""

    def open(self, opened: RowOpen, row: Row) -> None:
        """Another request has the row."""
        if row.way is not None:
            rules = packed_rules(opened.sampling, opened.prompt_len, row.way, self._vocab_size)
            self._resident.open(opened.row, rules)

    def step_of(self, plan: StepPlan, rows: Mapping[RowId, Row]) -> "DecodeStep | None":
        """What the plan computes, where each of its items is a row that draws one token on the device alone."""
        drawing, given, way = [], {}, WayToDraw.LARGEST
        for item in plan.items:
            row = rows[item.row]
            if row.way is None or item.q_len != 1 or not item.samples or _wants_more(item):
                return None
            way = max(way, row.way)
            drawing.append(DrawingItem(item, row))
            token = self._given(item, row)
            if token is not None:
                given[item.row] = token
        if not drawing:
            return None
        lines = tuple([one.item.row for one in drawing])
        starts = np.array([one.item.q_start for one in drawing], np.int64)
        shared = self._shared(lines, plan.work.shared)
        return DecodeStep(drawing, DecodingRows(lines, starts, given, shared, plan.work.split_tokens), way)

    def draw(self, step: "DecodeStep") -> Tensor | None:
        """See StepGraphs.draw."""
        return self._graphs.draw(step.rows, step.way)

    def shared_tokens(self, step: "DecodeStep") -> int:
        """Positions that the step, the last one, did not read again."""
        return self._graphs.shared_tokens(len(step.rows.rows))

    def _given(self, item: PlanItem, row: Row) -> int | None:
        """The input token, where it is not what the device drew for the row last."""
        if isinstance(item.inputs, TokenOf):
            return None if row.is_on_device(item.inputs.step) else row.drawn_in(item.inputs.step)
        token = int.from_bytes(item.inputs.tokens, "little")
        if not token < self._vocab_size:
            raise StateError(f"token {token} of row {item.row} is beyond the vocabulary of {self._vocab_size}")
        row.give(item.q_start, np.array([token], np.int64))
        return token

    def _shared(self, lines: tuple[RowId, ...], runs: tuple[SharedRun, ...]) -> tuple[Shared, ...]:
        if (lines, runs) != self._runs[:2]:
            places = {row: index for index, row in enumerate(lines)}
            shared = [Shared(run.start, run.end, tuple([places[r] for r in run.rows if r in places])) for run in runs]
            self._runs = lines, runs, tuple(shared)
        return self._runs[2]


def _wants_more(item: PlanItem) -> bool:
    return bool(item.num_drafts or item.wanted_drafts or item.wants_features or item.wants_prompt_logprobs)


class DecodeStep:
    """A decode step by rows that the device keeps."""

    def __init__(self, drawing: Sequence[DrawingItem], rows: DecodingRows, way: WayToDraw) -> None:
        self.drawing = drawing
        self.rows = rows
        self.way = way
