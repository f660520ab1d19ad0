"""StepPlan -> what the decoder and the attention backend take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaserve.base.ids import RowId
from deltaserve.device.attention import Batch, Query, Shared
from deltaserve.runner.row_state import Row
from deltaserve.sched.plan import PlanItem, StepPlan, TokenValues

_UINT32_LE = np.dtype("<u4")
_WORTH_SKIPPING = 64
"""Tokens of which nothing is read; with fewer, a second plan of the attention costs more than their last layer."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tokens of all items, one after the other."""

    batch: Batch
    tokens: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    wanted: "Wanted"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens whose hidden states are read: a prompt's last one, or all of it for its log-probabilities; the last
    token of a row and the guesses behind it."""

    batch: Batch
    """Of their attention."""
    tokens: npt.NDArray[np.int64]  # [N] of the step's tokens
    ends: tuple[int, ...]
    """End of each item's part of them."""


def step_inputs(plan: StepPlan, rows: Mapping[RowId, Row]) -> StepInputs:
    """Resolves input tokens (by value, or what the row drew) and books them in the rows."""
    tokens = np.concatenate([_item_tokens(item, rows[item.row]) for item in plan.items])
    places = {item.row: index for index, item in enumerate(plan.items)}
    shared = tuple(
        Shared(run.start, run.end, tuple(places[row] for row in run.rows if row in places)) for run in plan.work.shared
    )
    queries = tuple(Query(item.row, item.q_start, item.q_len) for item in plan.items)
    undecided = tuple(index for index, item in enumerate(plan.items) if item.num_drafts)
    batch = Batch(queries, plan.work.split_tokens, shared, undecided)
    return StepInputs(
        batch=batch,
        tokens=tokens,
        positions=batch.positions(),
        wanted=_wanted(plan.items, batch),
    )


def _wanted(items: Sequence[PlanItem], batch: Batch) -> Wanted:
    lens = [item.q_len if item.wants_prompt_logprobs else num_draws(item) for item in items]
    ends = np.cumsum([item.q_len for item in items])
    if batch.num_tokens - sum(lens) < _WORTH_SKIPPING:
        return Wanted(batch, np.arange(batch.num_tokens), tuple(ends.tolist()))
    tokens = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lens, strict=True)])
    read = [index for index, length in enumerate(lens) if length]
    places = {index: place for place, index in enumerate(read)}
    queries = tuple(Query(items[i].row, items[i].q_start + items[i].q_len - lens[i], lens[i]) for i in read)
    shared = tuple(
        Shared(run.start, run.end, tuple(places[index] for index in run.queries if index in places))
        for run in batch.shared
    )
    return Wanted(Batch(queries, batch.split_tokens, shared), tokens, tuple(np.cumsum(lens).tolist()))


def num_draws(item: PlanItem) -> int:
    """Tokens that may be drawn for it."""
    return 1 + item.num_drafts if item.samples else 0


def _item_tokens(item: PlanItem, row: Row) -> npt.NDArray[np.int64]:
    """[q_len]"""
    if isinstance(item.inputs, TokenValues):
        tokens = np.frombuffer(item.inputs.tokens, _UINT32_LE).astype(np.int64)
    else:
        tokens = np.array([row.drawn_in(item.inputs.step)], np.int64)
    if len(tokens) != item.q_len:
        raise ValueError(f"{len(tokens)} input tokens for q_len {item.q_len} of row {item.row}")
    row.give(item.q_start, tokens[: item.num_known])
    return tokens
