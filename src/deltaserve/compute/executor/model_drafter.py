"""Guesses by a draft head: what it keeps of each token is computed with the token, and guesses follow behind it.

In each step the head fills the same positions of a row as the model, one layer behind it: entry j is of the token at j
and of what the model made of the token at j - 1, which is kept from the step before (compute/layers/draft_head.py).
Then it goes on behind the tokens just drawn, from its own states; those entries are written over by the next step's.
All ranks do the same, with the tokens that the first one drew.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.layers.decoder import Hidden
from deltaserve.compute.layers.draft_head import Drafted, DraftHead
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.control.sched.plan import ItemResult, PlanItem, StepPlan
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import pack_u32

_log = logging.getLogger(__name__)
_PASS_LEN = 2048
"""Tokens of a prompt that the head fills at once where prefill has not."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the head reads of one token of a row."""

    position: int
    features: Tensor  # [F]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions [start, start + len(tokens)) of a row that the head computes in this step."""

    row: RowId
    start: int
    tokens: npt.NDArray[np.int64]
    features: Tensor  # [the same, F] of the token before each
    wanted: int
    """Guesses behind the last one."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ModelDrafter:
    """Guessing by a draft head on one rank."""

    def __init__(
        self, head: DraftHead, attention: AttentionBackend, group: int, rank: int, device: torch.device
    ) -> None:
        """`group`: of the head's pages."""
        self._head = head
        self._attention = attention
        self._group = group
        self._rank = rank
        self._device = device
        self._known: dict[RowId, _Known] = {}
        self._starts: dict[RowId, DraftStart] = {}
        """Where the head begins in rows that no step has computed yet."""
        self.num_filled = 0
        """Tokens of prompts that came without what the head keeps of them."""
        self._tell_at = 1

    def open(self, row: RowId, start: DraftStart | None) -> None:
        self.close(row)
        if start is not None:
            self._starts[row] = start

    def close(self, row: RowId) -> None:
        self._known.pop(row, None)
        self._starts.pop(row, None)

    def follow(
        self,
        plan: StepPlan,
        hidden: Hidden,
        rows: Mapping[RowId, Row],
        results: Sequence[ItemResult],
        drawn: Sequence[Sequence[int]],
    ) -> tuple[ItemResult, ...]:
        """`hidden`: of all tokens of the step; `drawn`: behind each item, on every rank.

        `results` come back with guesses and features.
        """
        features = self._head.features(hidden)  # [T, F]
        ends = np.cumsum([item.q_len for item in plan.items])
        pieces, told = [], []
        for item, end, tokens in zip(plan.items, ends.tolist(), drawn, strict=True):
            num_right = max(0, len(tokens) - 1)
            own = features[end - item.q_len : end - item.num_drafts + num_right]
            pieces.append(self._piece(item, rows[item.row], own, tokens))
            told.append(self._bytes(own[item.num_known - 1]) if item.wants_features else b"")
        guesses = self._guesses(pieces, plan.work.split_tokens, plan.least_likely)
        return tuple(
            ItemResult(r.row, r.drawn, r.outcome, r.prompt_logprobs, of_item, pack_u32(guesses[r.row]))
            for r, of_item in zip(results, told, strict=True)
        )

    def _piece(self, item: PlanItem, row: Row, features: Tensor, drawn: Sequence[int]) -> _Piece:
        """`features` [n, F] of the item's tokens that are right. What the head has of the row is kept."""
        start, before = item.q_start, self._known.get(item.row)
        given = self._starts.pop(item.row, None)
        if given is not None:
            start = min(start, given.first)
            self._count_filled(item.q_start - start)
            before = self._given(given)
        filled = [features.new_zeros((item.q_start + 1 - start, features.shape[1])), features]
        if before is not None and before.position == start - 1:
            filled[0][0] = before.features
        last = item.q_start + len(features) - 1
        self._known[item.row] = _Known(last, features[-1].clone())
        wanted = item.wanted_drafts if drawn else 0
        count = last + 1 - start + (wanted > 0)
        # On every rank: those that draw nothing know the tokens of the plan, and what they were told.
        inputs = row.tokens(start, item.q_start + item.num_known)
        tokens = np.concatenate([inputs, np.array(drawn, np.int64)])[:count]
        return _Piece(item.row, start, tokens, torch.cat(filled)[:count], wanted)

    def _count_filled(self, num_tokens: int) -> None:
        self.num_filled += num_tokens
        if self.num_filled >= self._tell_at and self._rank == 0:
            self._tell_at = 2 * self.num_filled
            _log.info(
                "prefill has sent no keys and values of the draft head: filled for %d tokens of prompts here, from the "
                "tokens alone, so fewer guesses are right",
                self.num_filled,
            )

    def _given(self, start: DraftStart) -> _Known | None:
        dtype = self._head.dtype
        if len(start.features) != self._head.feature_size * dtype.itemsize:
            return None
        values = torch.frombuffer(bytearray(start.features), dtype=dtype)
        return _Known(start.first - 1, values.to(self._device))

    @staticmethod
    def _bytes(features: Tensor) -> bytes:
        return features.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    # ------------------------------------------------------------ passes of the head

    def _guesses(self, pieces: Sequence[_Piece], split_tokens: int, least_likely: float) -> dict[RowId, list[int]]:
        pieces = [self._filled(piece, split_tokens) for piece in pieces]
        guesses: dict[RowId, list[int]] = {piece.row: [] for piece in pieces}
        asked = [piece for piece in pieces if piece.wanted]
        drafted = self._pass(pieces, asked, split_tokens)
        likely = [1.0] * len(asked)  # of each, that all its guesses are right
        for count in range(1, 1 + max((piece.wanted for piece in asked), default=0)):
            found = self._weighed(drafted.normed, least_likely > 0.0)
            likely = [before * own for before, (_, own) in zip(likely, found, strict=True)]
            kept = [index for index in range(len(asked)) if likely[index] >= least_likely]
            for index in kept:
                guesses[asked[index].row].append(found[index][0])
            going_on = [index for index in kept if asked[index].wanted > count]
            if not going_on:
                break
            features = drafted.features[going_on]
            likely = [likely[index] for index in going_on]
            asked = [
                _Piece(asked[i].row, asked[i].end, np.array([found[i][0]]), features[at : at + 1], asked[i].wanted)
                for at, i in enumerate(going_on)
            ]
            drafted = self._pass(asked, asked, split_tokens)
        return guesses

    def _weighed(self, normed: Tensor, is_asked: bool) -> list[tuple[int, float]]:
        """Guesses, each with how likely it is; as certain where that is not asked."""
        if not is_asked:
            return [(guess, 1.0) for guess in self._head.guesses(normed).tolist()]
        guesses, likely = self._head.weighed_guesses(normed)
        return list(zip(guesses.tolist(), likely.tolist(), strict=True))

    def _filled(self, piece: _Piece, split_tokens: int) -> _Piece:
        """What is left of a piece that is longer than a pass."""
        while len(piece.tokens) > _PASS_LEN:
            first = _Piece(piece.row, piece.start, piece.tokens[:_PASS_LEN], piece.features[:_PASS_LEN], 0)
            self._pass([first], [], split_tokens)
            rest = piece.tokens[_PASS_LEN:], piece.features[_PASS_LEN:]
            piece = _Piece(piece.row, first.end, *rest, piece.wanted)
        return piece

    def _pass(self, pieces: Sequence[_Piece], asked: Sequence[_Piece], split_tokens: int) -> Drafted:
        """One pass of the head over `pieces`; guesses behind the last token of each that is asked."""
        batch = Batch(tuple(Query(piece.row, piece.start, len(piece.tokens)) for piece in pieces), split_tokens)
        return self._head.forward(
            self._tensor(np.concatenate([piece.tokens for piece in pieces])),
            self._tensor(batch.positions()),
            torch.cat([piece.features for piece in pieces]),
            self._attention.begin_group(batch, self._group),
            None if len(asked) == batch.num_tokens else self._last_tokens(pieces, asked, split_tokens),
        )

    def _last_tokens(self, pieces: Sequence[_Piece], asked: Sequence[_Piece], split_tokens: int) -> LastTokens:
        ends = np.cumsum([len(piece.tokens) for piece in pieces]).tolist()
        rows = {piece.row for piece in asked}
        places = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.row in rows]
        batch = Batch(tuple(Query(piece.row, piece.end - 1, 1) for piece in asked), split_tokens)
        attention = [self._attention.begin_group(batch, self._group)] if asked else []
        return LastTokens(self._tensor(np.array(places, np.int64)), attention)

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return on_device(values, self._device)
