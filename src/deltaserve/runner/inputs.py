"""StepPlan -> what the decoder and the attention backend take."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaserve.base.ids import RowId
from deltaserve.device.attention import Batch, Query, Shared
from deltaserve.runner.rows import Row
from deltaserve.sched.plan import PlanItem, StepPlan, TokenValues

_UINT32_LE = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tokens of all items, one after the other."""

    batch: Batch
    tokens: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    starts: tuple[int, ...]
    """Index in `tokens` of each item's first token."""


def step_inputs(plan: StepPlan, rows: Mapping[RowId, Row]) -> StepInputs:
    """Resolves input tokens (by value, or what the row drew) and books them in the rows."""
    tokens = [_item_tokens(item, rows[item.row]) for item in plan.items]
    places = {item.row: index for index, item in enumerate(plan.items)}
    shared = tuple(
        Shared(run.start, run.end, tuple(places[row] for row in run.rows if row in places)) for run in plan.work.shared
    )
    queries = tuple(Query(item.row, item.q_start, item.q_len) for item in plan.items)
    starts = np.cumsum([0, *(item.q_len for item in plan.items)])
    return StepInputs(
        batch=Batch(queries, plan.work.split_tokens, shared),
        tokens=np.concatenate(tokens),
        positions=np.concatenate([np.arange(query.q_start, query.q_end) for query in queries]),
        starts=tuple(starts[:-1].tolist()),
    )


def _item_tokens(item: PlanItem, row: Row) -> npt.NDArray[np.int64]:
    """[q_len]"""
    if isinstance(item.inputs, TokenValues):
        tokens = np.frombuffer(item.inputs.tokens, _UINT32_LE).astype(np.int64)
    else:
        tokens = np.array([row.drawn_in(item.inputs.step)], np.int64)
    if len(tokens) != item.q_len:
        raise ValueError(f"{len(tokens)} input tokens for q_len {item.q_len} of row {item.row}")
    row.give(item.q_start, tokens)
    return tokens
