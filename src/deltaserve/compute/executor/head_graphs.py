"""Passes of a draft head recorded once for each of a few numbers of tokens, and replayed: of a few tokens of each row,
as they come behind a step, and of one token of each.

Guesses are made in the recording, and how likely they are: the host reads both in one copy.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deltaserve.compute.attention.fixed_step import FixedStepBackend
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.executor.given_rows import GivenStep
from deltaserve.compute.executor.head_passes import Guesses, HeadPass, Passes
from deltaserve.compute.executor.recordings import Recordings, bucket_of
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.layers.draft_head import DraftHead
from deltaserve.compute.layers.layer_kind import LastTokens

_log = logging.getLogger(__name__)


class _RecordedPass:
    """A pass of one number of tokens, and what replays left."""

    def __init__(self, head: DraftHead, features: Tensor, step: GivenStep, asked: GivenStep | None) -> None:
        """`features` [T, F] of `step`, where each run finds them. `asked`: the last tokens of those rows behind which
        it guesses, whose given tokens are their places in the step; None: all of the step's."""
        self._head = head
        self.features = features
        self.step = step
        self.asked = asked
        self.replay: Callable[[], None] | None = None
        self.guesses = self.made = features
        """[2, A] int64 as the last run or replay left them: tokens, and bits of float64 how likely they are. [A, F]."""

    def prepare(self, of: HeadPass) -> bool:
        """See GivenStep."""
        fits = self.step.prepare(of.batch, of.tokens)
        self.features[: len(of.features)].copy_(of.features)
        return fits if self.asked is None else self.asked.prepare(of.asked_batch, of.asked_places) and fits

    def run(self) -> None:
        step, asked = self.step, self.asked
        step.plan()
        (attention,) = step.attention
        last = None
        if asked is not None:
            asked.plan()
            last = LastTokens(asked.rows.tokens, asked.attention)
        drafted = self._head.forward(step.rows.tokens, step.rows.positions, self.features, attention, last)
        guesses, likely = self._head.weighed_guesses(drafted.normed)
        self.guesses, self.made = torch.stack((guesses, likely.double().view(torch.int64))), drafted.features


class HeadGraphs:
    """Passes that are replayed, and others. Recorded when a number of tokens comes first, and again where a pass needs
    more room. For one thread."""

    def __init__(
        self,
        head: DraftHead,
        pages: tuple[FixedStepBackend, int, ResidentRows],
        max_tokens: int,
        recordings: Recordings,
        others: Passes,
    ) -> None:
        """`pages`: attention, page group of the head, and who keeps the page tables. `max_tokens`: of a recorded pass.
        `others`: compute what is not recorded."""
        attention, group, self._resident = pages
        self._head = head
        self._make = partial(attention.fixed_group, group=group)
        self._max_tokens = max_tokens
        self._recordings = recordings
        self._others = others
        device = self._resident.positions.device
        self._features = torch.zeros((max_tokens, head.feature_size), dtype=head.dtype, device=device)
        self._recorded: dict[tuple[int, bool], _RecordedPass] = {}
        """Tokens, and whether it guesses behind each |-> the pass."""

    def run(self, of: HeadPass) -> Guesses:
        if len(of.features) > self._max_tokens or any(len(piece.tokens) > MAX_TILED_LEN for piece in of.pieces):
            return self._others.run(of)
        if self._recordings.has_failed:
            self._recorded.clear()
            return self._others.run(of)
        self._resident.tell_pages()
        number = bucket_of(len(of.features), self._max_tokens)
        found = self._recordings.prepared(f"a pass of {number} tokens", partial(self._prepared, of, number))
        if found is None or found.replay is None:
            self._recorded.clear()
            return self._others.run(of)
        found.replay()
        count = len(of.asked)
        if not count:
            return Guesses((), (), found.made[:0])
        tokens, bits = found.guesses[:, :count].cpu()
        likely = bits.view(torch.float64).tolist() if of.least_likely > 0.0 else [1.0] * count
        return Guesses(tokens.tolist(), likely, found.made[:count])

    def _prepared(self, of: HeadPass, number: int) -> _RecordedPass:
        kind = number, of.is_of_last_tokens
        found = self._recorded.get(kind) or self._made(number, of.is_of_last_tokens)
        self._recorded[kind] = found
        if not found.prepare(of) or found.replay is None:
            found.replay = self._recordings.record(found.run)
            _log.debug("CUDA graphs: a pass of %d tokens is recorded", number)
        return found

    def _made(self, number: int, guesses_behind_each: bool) -> _RecordedPass:
        """Where it does not guess behind each, it does behind one of two at most: behind what was just drawn."""
        step = GivenStep(self._resident, number, self._make)
        asked = None if guesses_behind_each else GivenStep(self._resident, max(1, number // 2), self._make)
        return _RecordedPass(self._head, self._features[:number], step, asked)
