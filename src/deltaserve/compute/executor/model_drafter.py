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

from deltaserve.compute.executor.head_passes import HeadPass, Passes, RowPiece
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.layers.decoder import Hidden
from deltaserve.compute.layers.draft_head import DraftHead
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.control.sched.draft_book import DraftStart
from deltaserve.control.sched.plan import ItemResult, PlanItem, StepPlan
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import pack_u32

_log = logging.getLogger(__name__)
_PASS_LEN = 2048
"""Tokens of a prompt that the head fills at once where prefill has not."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the head computes of a row in this step."""

    piece: RowPiece
    sources: npt.NDArray[np.int64]  # [tokens of the piece]
    """Where features of the token before each stand: lines of what is kept of rows, then those of the step's tokens."""
    wanted: int
    """Guesses behind the last one."""


class ModelDrafter:
    """Guessing by a draft head on one rank."""

    def __init__(self, head: DraftHead, passes: Passes, rank: int, max_rows: int, device: torch.device) -> None:
        """`passes`: of the head."""
        self._head = head
        self._passes = passes
        self._rank = rank
        self._device = device
        self._nothing = max_rows
        self._kept = torch.zeros((max_rows + 1, head.feature_size), dtype=head.dtype, device=device)
        """[lines, F] features of the last token of each row that is known; zeros in the line of no row."""
        self._known: dict[RowId, int] = {}
        """Its position, where there is one."""
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
        firsts = np.cumsum([0, *(item.q_len for item in plan.items)]).tolist()
        lens = [item.num_known + max(0, len(tokens) - 1) for item, tokens in zip(plan.items, drawn, strict=True)]
        asked, told = [], []
        for item, first, length, tokens in zip(plan.items, firsts, lens, drawn, strict=False):
            asked.append(self._asked(item, rows[item.row], (first, length), tokens))
            told.append(self._bytes(features[first + item.num_known - 1]) if item.wants_features else b"")
        read = torch.cat((self._kept, features))
        lasts = np.array([first + length - 1 for first, length in zip(firsts, lens, strict=False)], np.int64)
        lines = np.array([item.row for item in plan.items], np.int64)
        self._kept.index_copy_(0, self._tensor(lines), features.index_select(0, self._tensor(lasts)))
        guesses = self._guesses(asked, read, plan.work.split_tokens, plan.least_likely)
        return tuple(
            ItemResult(r.row, r.drawn, r.outcome, r.prompt_logprobs, of_item, pack_u32(guesses[r.row]))
            for r, of_item in zip(results, told, strict=True)
        )

    def _asked(self, item: PlanItem, row: Row, right: tuple[int, int], drawn: Sequence[int]) -> _Asked:
        """`right`: the item's tokens that are, as the first of them and how many among the step's."""
        start, known, (first, length) = item.q_start, self._known.get(item.row), right
        given = self._starts.pop(item.row, None)
        if given is not None:
            start = min(start, given.first)
            self._count_filled(item.q_start - start)
            known = self._given(item.row, given)
        num_before = item.q_start + 1 - start
        sources = np.full(num_before + length, self._nothing, np.int64)
        if known == start - 1:
            sources[0] = item.row
        sources[num_before:] = self._nothing + 1 + first + np.arange(length)
        self._known[item.row] = item.q_start + length - 1
        wanted = item.wanted_drafts if drawn else 0
        count = item.q_start + length - start + (wanted > 0)
        # On every rank: those that draw nothing know the tokens of the plan, and what they were told.
        inputs = row.tokens(start, item.q_start + item.num_known)
        tokens = np.concatenate([inputs, np.array(drawn, np.int64)])[:count]
        return _Asked(RowPiece(item.row, start, tokens), sources[:count], wanted)

    def _count_filled(self, num_tokens: int) -> None:
        self.num_filled += num_tokens
        if self.num_filled >= self._tell_at and self._rank == 0:
            self._tell_at = 2 * self.num_filled
            _log.info(
                "prefill has sent no keys and values of the draft head: filled for %d tokens of prompts here, from the "
                "tokens alone, so fewer guesses are right",
                self.num_filled,
            )

    def _given(self, row: RowId, start: DraftStart) -> int | None:
        """The position of which features came with the row, which are kept."""
        dtype = self._head.dtype
        if len(start.features) != self._head.feature_size * dtype.itemsize:
            return None
        self._kept[row] = torch.frombuffer(bytearray(start.features), dtype=dtype)
        return start.first - 1

    @staticmethod
    def _bytes(features: Tensor) -> bytes:
        return features.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    # ------------------------------------------------------------ passes of the head

    def _guesses(
        self, of_rows: Sequence[_Asked], read: Tensor, split_tokens: int, least_likely: float
    ) -> dict[RowId, list[int]]:
        """`read` [S, F]: where the sources of rows point to."""
        of_rows = [self._filled(one, read, split_tokens) for one in of_rows]
        guesses: dict[RowId, list[int]] = {one.piece.row: [] for one in of_rows}
        asked = [index for index, one in enumerate(of_rows) if one.wanted]
        features = self._features(read, np.concatenate([one.sources for one in of_rows]))
        found = self._passes.run(HeadPass([one.piece for one in of_rows], features, asked, split_tokens, least_likely))
        rows = [(of_rows[index].piece.row, of_rows[index].piece.end, of_rows[index].wanted) for index in asked]
        likely = [1.0] * len(rows)  # of each, that all its guesses are right
        for count in range(1, 1 + max((wanted for *_, wanted in rows), default=0)):
            likely = [before * own for before, own in zip(likely, found.likely, strict=True)]
            kept = [index for index in range(len(rows)) if likely[index] >= least_likely]
            for index in kept:
                guesses[rows[index][0]].append(found.tokens[index])
            going_on = [index for index in kept if rows[index][2] > count]
            if not going_on:
                break
            features = found.features
            if len(going_on) < len(rows):
                features = self._features(features, np.array(going_on, np.int64))
            pieces = [RowPiece(rows[i][0], rows[i][1], np.array([found.tokens[i]])) for i in going_on]
            rows = [(row, end + 1, wanted) for row, end, wanted in (rows[index] for index in going_on)]
            likely = [likely[index] for index in going_on]
            found = self._passes.run(HeadPass(pieces, features, range(len(pieces)), split_tokens, least_likely))
        return guesses

    def _filled(self, one: _Asked, read: Tensor, split_tokens: int) -> _Asked:
        """What is left of a piece that is longer than a pass."""
        while len(one.piece.tokens) > _PASS_LEN:
            piece, features = one.piece, self._features(read, one.sources[:_PASS_LEN])
            first = RowPiece(piece.row, piece.start, piece.tokens[:_PASS_LEN])
            self._passes.run(HeadPass([first], features, (), split_tokens, 0.0))
            rest = RowPiece(piece.row, first.end, piece.tokens[_PASS_LEN:])
            one = _Asked(rest, one.sources[_PASS_LEN:], one.wanted)
        return one

    def _features(self, read: Tensor, lines: npt.NDArray[np.int64]) -> Tensor:
        return read.index_select(0, self._tensor(lines))

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return on_device(values, self._device)
