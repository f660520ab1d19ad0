"""Passes of a draft head recorded once for each of a few numbers of tokens, and replayed: of a few tokens of each row,
as they come behind a step, and of one token of each.

Guesses are made in the recording, and how likely they are: the host reads both in one copy.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.attention.fixed_step import FixedStepBackend, RowsToCome
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.executor.given_rows import GivenStep
from deltaserve.compute.executor.head_passes import Guesses, HeadPass, Passes
from deltaserve.compute.executor.recordings import RecordingFailed, Recordings, bucket_of
from deltaserve.compute.executor.resident_rows import Int64s, ResidentRows
from deltaserve.compute.layers.draft_head import DraftHead
from deltaserve.compute.layers.layer_kind import LastTokens

_log = logging.getLogger(__name__)


class _Made(NamedTuple):
    """What runs leave of the A tokens behind which they guess."""

    guesses: Tensor  # [2, A] int64: tokens, and bits of float64 how likely they are
    features: Tensor  # [A, F]


class _RecordedPass:
    """A pass of one number of tokens, and what replays leave."""

    def __init__(
        self, head: DraftHead, features: Tensor, step: GivenStep, asked: GivenStep | None, made: _Made
    ) -> None:
        """`features` [T, F] of `step`, where each run finds them. `asked`: the last tokens of those rows behind which
        it guesses, whose given tokens are their places in the step; None: all of the step's."""
        self._head = head
        self._features = features
        self._step = step
        self._asked = asked
        self.made = made
        self.replay: Callable[[], None] | None = None

    def steps(self, of: HeadPass) -> list[tuple[GivenStep, RowsToCome, Int64s]]:
        """What is told of a pass: rows of each step, and its tokens."""
        steps = [(self._step, RowsToCome.of(of.batch), of.tokens)]
        if self._asked is not None:
            steps.append((self._asked, RowsToCome.of(of.asked_batch), of.asked_places))
        return steps

    def run(self) -> None:
        step, asked = self._step, self._asked
        step.plan()
        (attention,) = step.attention
        last = None
        if asked is not None:
            asked.plan()
            last = LastTokens(asked.rows.tokens, asked.attention)
        drafted = self._head.forward(step.rows.tokens, step.rows.positions, self._features, attention, last)
        guesses, likely = self._head.weighed_guesses(drafted.normed)
        assert self.made.features.dtype is drafted.features.dtype
        self.made.guesses.copy_(torch.stack((guesses, likely.double().view(torch.int64))))
        self.made.features.copy_(drafted.features)


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
        self._make, self._max_keys = partial(attention.fixed_group, group=group), attention.max_keys
        self._max_tokens = max_tokens
        self._recordings = recordings
        self._others = others
        device = self._resident.positions.device
        # The same memory for all of them: only one is computed at a time.
        self._features = torch.zeros((max_tokens, head.feature_size), dtype=head.dtype, device=device)
        self._made_features = torch.zeros_like(self._features)
        self._made_guesses = torch.zeros(2 * max_tokens, dtype=torch.int64, device=device)
        self._recorded: dict[tuple[int, bool], _RecordedPass] = {}
        """Tokens, and whether it guesses behind each |-> the pass."""

    def run(self, of: HeadPass) -> Guesses:
        if self._recordings.has_failed:
            self._recorded.clear()
            return self._others.run(of)
        if not self._has(of):
            return self._others.run(of)
        self._resident.tell_pages()
        features = self._features[: len(of.features)]
        features.copy_(of.features)  # they may stand where this pass leaves its own, as may one that fails
        try:
            replay, made = self._prepared(of, bucket_of(len(features), self._max_tokens))
        except RecordingFailed:
            self._recorded.clear()
            return self._others.run(replace(of, features=features))
        replay()
        count = len(of.asked)
        if not count:
            return Guesses((), (), made.features[:0])
        tokens, bits = made.guesses[:, :count].cpu()
        likely = bits.view(torch.float64).tolist() if of.least_likely > 0.0 else [1.0] * count
        return Guesses(tokens.tolist(), likely, made.features[:count])

    def _has(self, of: HeadPass) -> bool:
        """Whether there is a recording for it, or would be. Of few tokens most may be asked where what is left of a
        prompt is one token: such a pass has no room for them."""
        num_tokens = len(of.features)
        if num_tokens > self._max_tokens or any(len(piece.tokens) > MAX_TILED_LEN for piece in of.pieces):
            return False
        return of.is_of_last_tokens or len(of.asked) <= _room_for_asked(bucket_of(num_tokens, self._max_tokens))

    def _prepared(self, of: HeadPass, number: int) -> tuple[Callable[[], None], _Made]:
        what, kind = f"a pass of {number} tokens", (number, of.is_of_last_tokens)
        found = self._recorded.get(kind) or self._recordings.attempt(what, partial(self._made, *kind))
        self._recorded[kind] = found
        steps = found.steps(of)
        for step, rows, _ in steps:
            if not step.has_room(rows):
                found.replay = None
                self._recordings.attempt(what, partial(step.make_room, rows))
        for step, rows, tokens in steps:
            step.rows.tell(rows, tokens)
        if found.replay is None:
            found.replay = self._recordings.record(what, found.run)
            _log.debug("CUDA graphs: %s is recorded", what)
        return found.replay, found.made

    def _made(self, number: int, guesses_behind_each: bool) -> _RecordedPass:
        room = number if guesses_behind_each else _room_for_asked(number)
        made = _Made(self._made_guesses[: 2 * room].view(2, room), self._made_features[:room])
        asked = None if guesses_behind_each else self._given(room)
        return _RecordedPass(self._head, self._features[:number], self._given(number), asked, made)

    def _given(self, room: int) -> GivenStep:
        return GivenStep(self._resident, room, self._make, self._max_keys)


def _room_for_asked(num_tokens: int) -> int:
    """Where a pass does not guess behind each token, it does behind one of two at most: behind what was just drawn."""
    return max(1, num_tokens // 2)
