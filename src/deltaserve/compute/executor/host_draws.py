"""What the host draws behind a step: log-probabilities, tokens and guesses, once their logits are there.

Draws that it leaves to the device: unread_draws.py, resident_draws.py.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.executor.grammar_masks import Masks
from deltaserve.compute.executor.inputs import StepInputs, num_draws
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.sampler import SampleRow, finite_rows, sample, token_logprobs
from deltaserve.compute.executor.scratch import LOGPROB_POSITIONS
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.layers.step_ops import Peaks
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, PlanItem, Sampled, StepPlan
from deltaserve.control.sched.speculation import right_draws
from deltaserve.core.ids import RowId
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.model.drafts.drafter import DraftAsk, Drafter


class HostDraws:
    """Draws of one rank: the first one has tokens and log-probabilities, the others take part in their logits."""

    def __init__(
        self, decoder: Decoder, rows: Mapping[RowId, Row], drafter: Drafter | None, device: torch.device
    ) -> None:
        """`rows`: those of the executor, as they are at each step. `drafter`: guesses from tokens alone; None: nobody
        does."""
        self._decoder = decoder
        self._rows = rows
        self._drafter = drafter
        self._device = device

    def results(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, masks: "Future[Masks] | None"
    ) -> tuple[ItemResult, ...]:
        """Results of the plan's items, whose rows learn what is drawn.

        hidden [N, hidden] of the wanted tokens. `masks`: of rows with a grammar; None: there are none.
        """
        results = {item.row: ItemResult(item.row) for item in plan.items}
        for item, end in zip(plan.items, inputs.wanted.ends, strict=True):
            if item.wants_prompt_logprobs:
                results[item.row] = self._prompt_logprobs(item, hidden[end - item.q_len : end])
        drawing = [(item, end) for item, end in zip(plan.items, inputs.wanted.ends, strict=True) if item.samples]
        if drawing:
            wanted = np.concatenate([np.arange(end - num_draws(item), end) for item, end in drawing])
            logits = self._decoder.logits(hidden.index_select(0, on_device(wanted, self._device)))  # [D, V] float32
            if self._decoder.shard.rank == 0:
                found = {} if masks is None else masks.result()
                for result in self._draw(plan, [item for item, _ in drawing], logits, found):
                    of_prompt = results[result.row]
                    outcome = of_prompt.outcome if result.drawn else result.outcome
                    results[result.row] = replace(result, outcome=outcome, prompt_logprobs=of_prompt.prompt_logprobs)
        return tuple(results[item.row] for item in plan.items)

    def _draw(self, plan: StepPlan, items: Sequence[PlanItem], logits: Tensor, masks: Masks) -> list[ItemResult]:
        """logits [D, V]: of each item's last known position, and of its guesses."""
        firsts = np.cumsum([0, *(num_draws(item) for item in items)]).tolist()
        draws = _StepDraws(self._rows, logits, self._decoder.peaks(logits), masks, self._device)
        draws.draw_together(items, firsts)
        results = []
        for item, first in zip(items, firsts, strict=False):
            row = self._rows[item.row]
            begin = item.q_start + item.num_known
            drawn = right_draws(item, row.sampling, begin - row.prompt_len, partial(draws.of, item, first))
            for place, sampled in enumerate(drawn):
                row.draw(plan.step, begin + place, sampled.token)
            results.append(ItemResult(item.row, drawn, draws.outcome(item, drawn)))
        return self._with_drafts(items, results)

    def _with_drafts(self, items: Sequence[PlanItem], results: list[ItemResult]) -> list[ItemResult]:
        if self._drafter is None:
            return results
        asked = [
            DraftAsk(item.row, self._rows[item.row].known(), item.wanted_drafts)
            for item, result in zip(items, results, strict=True)
            if item.wanted_drafts and result.drawn
        ]
        proposed = dict(zip((ask.row for ask in asked), self._drafter.propose(asked), strict=True))
        return [replace(result, drafts=proposed.get(result.row, b"")) for result in results]

    def _prompt_logprobs(self, item: PlanItem, hidden: Tensor) -> ItemResult:
        """hidden [q_len, hidden]: position i predicts the token at i + 1, where that is known."""
        row = self._rows[item.row]
        targets = row.tokens(item.q_start + 1, item.q_start + item.q_len + 1)
        num_top = row.sampling.prompt_logprobs or 0
        out: list[TokenLogprobs] = []
        is_finite = True
        for start in range(0, item.q_len, LOGPROB_POSITIONS):  # all of them, whatever the logits are: ranks gather them
            logits = self._decoder.logits(hidden[start : start + LOGPROB_POSITIONS])
            piece = on_device(targets[start : start + LOGPROB_POSITIONS].copy(), self._device)
            is_finite = is_finite and all(finite_rows(logits[: len(piece)]))
            if is_finite and self._decoder.shard.rank == 0:
                out += token_logprobs(logits[: len(piece)], piece, num_top)
        if not is_finite:
            return ItemResult(item.row, outcome=ItemOutcome.NOT_FINITE)
        return ItemResult(item.row, prompt_logprobs=tuple(out))


class _StepDraws:
    """The draws of a step: what does not depend on tokens drawn before at once, the others when they are asked for."""

    def __init__(
        self, rows: Mapping[RowId, Row], logits: Tensor, peaks: Peaks, masks: Masks, device: torch.device
    ) -> None:
        """A drawer from `logits` [D, V]."""
        self._rows = rows
        self._masks = masks
        self._logits = logits
        self._device = device
        self._is_finite, self._largest = peaks
        self._drawn: dict[int, Sampled] = {}

    def draw_together(self, items: Sequence[PlanItem], firsts: Sequence[int]) -> None:
        """`firsts`: line of each item's first draw."""
        lines, sampling = [], []
        for item, first in zip(items, firsts, strict=False):
            row = self._rows[item.row]
            if (row.sampling.looks_back and item.num_drafts) or self._has_no_mask(item):
                continue
            for line in range(first, first + num_draws(item)):
                if self._is_finite[line]:
                    lines.append(line)
                    sampling.append(self._sample_row(item, line - first))
        if lines:
            logits = self._logits if len(lines) == len(self._logits) else self._logits[lines]
            draws = sample(logits, sampling, [self._largest[line] for line in lines])
            self._drawn = {line: Sampled(d.token, d.logprobs) for line, d in zip(lines, draws, strict=True)}

    def of(self, item: PlanItem, first: int, place: int) -> Sampled | None:
        """The token behind the last known one (place 0) or behind a guess; None: its logits are not finite.

        A rule that counts tokens counts those drawn before, so each is given to the row before the next is asked for.
        """
        line = first + place
        if not self._is_finite[line] or self._has_no_mask(item):
            return None
        if line not in self._drawn:
            (draw,) = sample(self._logits[line : line + 1], [self._sample_row(item, place)], [self._largest[line]])
            self._rows[item.row].give(item.q_start + item.num_known + place, np.array([draw.token], np.int64))
            return Sampled(draw.token, draw.logprobs)
        return self._drawn[line]

    def outcome(self, item: PlanItem, drawn: Sequence[Sampled]) -> ItemOutcome:
        """What became of an item for which these tokens were drawn."""
        if drawn:
            return ItemOutcome.COMPUTED
        return ItemOutcome.NO_GRAMMAR if self._has_no_mask(item) else ItemOutcome.NOT_FINITE

    def _has_no_mask(self, item: PlanItem) -> bool:
        """Whether its grammar met a limit."""
        return item.row in self._masks and self._masks[item.row] is None

    def _sample_row(self, item: PlanItem, place: int) -> SampleRow:
        row, masks = self._rows[item.row], self._masks.get(item.row)
        history = row.history(self._device) if row.sampling.needs_history else None
        end = item.q_start + item.num_known + place
        allowed = None if masks is None else masks[place]
        return SampleRow(row.sampling, end - row.prompt_len, history, allowed, _behind(row, end))


def _behind(row: Row, end: int) -> tuple[int, ...]:
    """What its bad words ask of the output that ends at position `end`."""
    longest = max(map(len, row.sampling.bad_words), default=1)
    return tuple(row.tokens(max(row.prompt_len, end - longest + 1), end).tolist()) if longest > 1 else ()
