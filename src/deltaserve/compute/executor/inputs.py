"""StepPlan -> what the decoder and the attention backend take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import PlanItem, SharedRun, StepPlan, TokenOf, TokenValues
from deltaserve.core.ids import RowId

_UINT32_LE = np.dtype("<u4")
_WORTH_SKIPPING = 64
"""Tokens of an item of which nothing is read; with fewer, a second plan of the attention costs more than their last
layer. The item alone decides: attention of its last token by itself has other last bits than among all of them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tokens of all items, one after the other."""

    batch: Batch
    tokens: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    wanted: "Wanted"
    unread: "UnreadTokens"


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """Input tokens that stand in the device's memory, where they were drawn; `StepInputs.tokens` has 0 for them."""

    places: npt.NDArray[np.int64]  # [U] of the step's tokens
    rows: npt.NDArray[np.int64]  # [U]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens whose hidden states are computed to the end: a long prompt's last one, or all of it for its
    log-probabilities; the last token of a row and the guesses behind it."""

    batch: Batch
    """Batch of their attention."""
    tokens: npt.NDArray[np.int64]  # [N] of the step's tokens
    ends: tuple[int, ...]
    """End of each item's part of them."""


def step_inputs(plan: StepPlan, rows: Mapping[RowId, Row]) -> StepInputs:
    """Resolves input tokens (by value, or what the row drew) and books them in the rows."""
    tokens = np.concatenate([_item_tokens(item, rows[item.row]) for item in plan.items])
    starts = np.cumsum([0, *(item.q_len for item in plan.items)])
    unread = [index for index, item in enumerate(plan.items) if is_unread(item, rows[item.row])]
    shared = shared_of([item.row for item in plan.items], plan.work.shared)
    queries = tuple(Query(item.row, item.q_start, item.q_len) for item in plan.items)
    undecided = tuple(index for index, item in enumerate(plan.items) if item.num_drafts)
    batch = Batch(queries, plan.work.split_tokens, shared, undecided)
    return StepInputs(
        batch=batch,
        tokens=tokens,
        positions=batch.positions(),
        wanted=_wanted(plan.items, batch),
        unread=UnreadTokens(starts[unread], np.array([plan.items[index].row for index in unread], np.int64)),
    )


def shared_of(rows: Sequence[RowId], runs: Sequence[SharedRun]) -> tuple[Shared, ...]:
    """Runs by the places of their rows among those of the step; of others nothing is read."""
    places = {row: index for index, row in enumerate(rows)}
    return tuple(Shared(run.start, run.end, tuple([places[r] for r in run.rows if r in places])) for run in runs)


def wants_more(item: PlanItem) -> bool:
    """Whether more than a token is asked of it: guesses, features, or log-probabilities of its prompt."""
    return bool(item.num_drafts or item.wanted_drafts or item.wants_features or item.wants_prompt_logprobs)


def _wanted(items: Sequence[PlanItem], batch: Batch) -> Wanted:
    lens = [_num_computed(item) for item in items]
    ends = np.cumsum([item.q_len for item in items])
    if sum(lens) == batch.num_tokens:
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


def _num_computed(item: PlanItem) -> int:
    """Last tokens of an item that the last layer computes."""
    length = item.q_len if item.wants_prompt_logprobs else num_draws(item)
    return length if item.q_len - length >= _WORTH_SKIPPING else item.q_len


def num_draws(item: PlanItem) -> int:
    """Tokens that may be drawn for it."""
    return 1 + item.num_drafts if item.samples else 0


def is_unread(item: PlanItem, row: Row) -> bool:
    """Whether its input token stands in the device's memory alone."""
    return isinstance(item.inputs, TokenOf) and row.is_on_device(item.inputs.step)


def _item_tokens(item: PlanItem, row: Row) -> npt.NDArray[np.int64]:
    """Input tokens of an item: [q_len]."""
    if is_unread(item, row):
        return np.zeros(item.q_len, np.int64)
    if isinstance(item.inputs, TokenValues):
        tokens = np.frombuffer(item.inputs.tokens, _UINT32_LE).astype(np.int64)
    else:
        tokens = np.array([row.drawn_in(item.inputs.step)], np.int64)
    if len(tokens) != item.q_len:
        raise ValueError(f"{len(tokens)} input tokens for q_len {item.q_len} of row {item.row}")
    row.give(item.q_start, tokens[: item.num_known])
    return tokens
