"""Which tokens the grammars of a step's rows allow, worked out beside the step.

A row's matcher is brought behind its output (control/sched/grammar_replay.py) and fills one mask for each place at
which a token is drawn: behind the last known token, and behind each guess that the grammar takes. The work begins
before the step's layers are computed, on a thread that needs the interpreter lock for microseconds, and its result is
taken when logits are there.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from deltaserve.compute.executor.allowed_tokens import WORD_BITS
from deltaserve.compute.executor.inputs import num_draws
from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.grammar_replay import GrammarReplay
from deltaserve.control.sched.plan import PlanItem, RowOpen, TokenValues
from deltaserve.core.errors import ENDS_THE_CALLER
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import TOKEN_BYTES, unpack_u32
from deltaserve.model.answer_grammars import AnswerGrammars, GrammarError

_log = logging.getLogger(__name__)
_ALL = 0xFFFF_FFFF
Masks = Mapping[RowId, npt.NDArray[np.uint32] | None]
"""Row |-> [places, ceil(V / 32)], behind the last known token and behind each guess; those behind a guess that the
grammar refuses allow everything, and what is drawn there is not used. None: the row's grammar met a limit."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """A row that draws in a step."""

    row: RowId
    output: bytes
    """Packed ids since the client's prompt."""
    drafts: list[int]


class GrammarMasks:
    """The grammars of the rows of one executor. For the step thread."""

    def __init__(self, grammars: AnswerGrammars | None, vocab_size: int) -> None:
        """`grammars` None: no row with a grammar can be drawn for."""
        self._grammars = grammars
        self._num_words = -(-vocab_size // WORD_BITS)
        self._replays: dict[RowId, GrammarReplay[LLMatcher]] = {}
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = LLExecutor()

    def open(self, opened: RowOpen) -> None:
        """A row begins; its grammar is compiled meanwhile, where it has one."""
        self.close(opened.row)
        grammar = opened.sampling.grammar
        if grammar is not None:
            self._replays[opened.row] = GrammarReplay(lambda: self._start(grammar))
            if self._grammars is not None:
                self._grammars.compile(grammar)

    def close(self, row: RowId) -> None:
        self._replays.pop(row, None)

    def begin(self, items: Sequence[PlanItem], rows: Mapping[RowId, Row]) -> "Future[Masks] | None":
        """Work out the masks of what these items draw. None: no row that draws has a grammar."""
        asked = [
            _Ask(item.row, _output(rows[item.row], item.q_start + item.num_known), _drafts_of(item))
            for item in items
            if item.row in self._replays and num_draws(item)
        ]
        return self._thread.submit(self._masks_or_none, asked) if asked else None

    def allowed_drafts(self, row: Row, row_id: RowId, drafts: bytes) -> bytes:
        """The first of these guesses that the row's grammar takes behind what is known. Not while masks are worked
        out."""
        if row_id not in self._replays or not drafts:
            return drafts
        matcher = self._matcher(row_id, _output(row, row.num_known))
        return b"" if matcher is None else drafts[: matcher.validate_tokens(list(unpack_u32(drafts))) * TOKEN_BYTES]

    def _masks_or_none(self, asked: Sequence[_Ask]) -> Masks:
        try:
            return self._masks(asked)
        except ENDS_THE_CALLER:
            raise
        except BaseException:  # a library in Rust panics with one: rows without a grammar have no part in it
            _log.exception("masks of %d rows with a grammar failed: their requests end", len(asked))
            return dict.fromkeys([ask.row for ask in asked])

    def _masks(self, asked: Sequence[_Ask]) -> Masks:
        masks = np.full((sum(1 + len(ask.drafts) for ask in asked), self._num_words), _ALL, np.uint32)
        matchers = {ask.row: self._matcher(ask.row, ask.output) for ask in asked}
        firsts, num_places = {}, 0
        for ask in asked:
            firsts[ask.row] = num_places
            num_places += 1 + len(ask.drafts)
        wanted = [(matchers[ask.row], firsts[ask.row], ask.drafts) for ask in asked]
        plain = [(matcher, first) for matcher, first, drafts in wanted if matcher is not None and not drafts]
        guessed = [(matcher, first, drafts) for matcher, first, drafts in wanted if matcher is not None and drafts]
        where = masks.ctypes.data, self._num_words * masks.itemsize, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)
        found: dict[RowId, npt.NDArray[np.uint32] | None] = {}
        for ask, (matcher, first, drafts) in zip(asked, wanted, strict=True):
            places = masks[first : first + 1 + len(drafts)]
            is_of_use = matcher is not None and not matcher.is_error() and bool(places[0].any())
            found[ask.row] = places if is_of_use else None
        return found

    def _start(self, grammar: str) -> LLMatcher:
        if self._grammars is None:
            raise GrammarError("this worker has no grammars")
        return self._grammars.matcher(grammar)

    def _matcher(self, row: RowId, output: bytes) -> LLMatcher | None:
        """None: the grammar met a limit, or never compiled."""
        try:
            return self._replays[row].behind(output)
        except GrammarError as error:
            _log.warning("row %d: %s", row, error)
            return None


def _output(row: Row, end: int) -> bytes:
    """Packed ids that a row has drawn since the client's prompt, up to a position."""
    return row.tokens(row.prompt_len, end).astype("<u4").tobytes()


def _drafts_of(item: PlanItem) -> list[int]:
    if not item.num_drafts or not isinstance(item.inputs, TokenValues):
        return []
    return list(unpack_u32(item.inputs.tokens[item.num_known * TOKEN_BYTES :]))
