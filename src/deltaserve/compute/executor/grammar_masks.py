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
from itertools import accumulate, pairwise

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
from deltaserve.model.answer_grammars import AnswerGrammars, Compiled, GrammarError

_log = logging.getLogger(__name__)
_ALL = 0xFFFF_FFFF
Masks = Mapping[RowId, npt.NDArray[np.uint32] | None]
"""Row |-> [places, ceil(V / 32)], behind the last known token and behind each guess; those behind a guess that the
grammar refuses allow everything, and what is drawn there is not used. None: the row's grammar met a limit."""
_FEWEST_BETWEEN = 8
"""Tokens that a row draws at the least between two times that its grammar is compiled anew for it."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """A row that draws in a step."""

    row: RowId
    output: bytes
    """Packed ids since the client's prompt."""
    drafts: list[int]


class _RowGrammar:
    """One row's grammar, brought behind its output.

    Rows with the same grammar share a lexer, which meets its limits after all that they have seen, not this row alone.
    So a row ends only when a lexer of its own meets them, too.
    """

    def __init__(self, grammar: str, grammars: AnswerGrammars | None) -> None:
        self._grammar, self._grammars = grammar, grammars
        self._compiled: Compiled | None = None
        self._replay = GrammarReplay(self._start)
        self._renewed_at: int | None = None

    def behind(self, output: bytes) -> LLMatcher | None:
        """None: the grammar met a limit, or never compiled."""
        try:
            return self._replay.behind(output)
        except GrammarError as error:
            _log.warning("a row's grammar: %s", error)
            return None

    def renewed(self, output: bytes) -> LLMatcher | None:
        """The same by a lexer that has seen nothing. None: it was renewed a moment ago, and that was of no use."""
        num_tokens, worn = len(output) // TOKEN_BYTES, self._compiled
        is_soon = self._renewed_at is not None and num_tokens < self._renewed_at + _FEWEST_BETWEEN
        if self._grammars is None or worn is None or is_soon:
            return None
        self._renewed_at = num_tokens
        self._grammars.renew(self._grammar, worn)
        self._replay = GrammarReplay(self._start)
        return self.behind(output)

    def _start(self) -> LLMatcher:
        if self._grammars is None:
            raise GrammarError("this worker has no grammars")
        self._compiled = self._grammars.compile(self._grammar)
        return self._grammars.copy(self._compiled)


class GrammarMasks:
    """The grammars of the rows of one executor. For the step thread."""

    def __init__(self, grammars: AnswerGrammars | None, vocab_size: int) -> None:
        """`grammars` None: no row with a grammar can be drawn for."""
        self._grammars = grammars
        self._num_words = -(-vocab_size // WORD_BITS)
        self._of_rows: dict[RowId, _RowGrammar] = {}
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = LLExecutor()

    def open(self, opened: RowOpen) -> None:
        """A row begins; its grammar is compiled meanwhile, where it has one."""
        self.close(opened.row)
        grammar = opened.sampling.grammar
        if grammar is not None:
            self._of_rows[opened.row] = _RowGrammar(grammar, self._grammars)
            if self._grammars is not None:
                self._grammars.compile(grammar)

    def close(self, row: RowId) -> None:
        self._of_rows.pop(row, None)

    def begin(self, items: Sequence[PlanItem], rows: Mapping[RowId, Row]) -> "Future[Masks] | None":
        """Work out the masks of what these items draw. None: no row that draws has a grammar."""
        asked = [
            _Ask(item.row, _output(rows[item.row], item.q_start + item.num_known), _drafts_of(item))
            for item in items
            if item.row in self._of_rows and num_draws(item)
        ]
        return self._thread.submit(self._masks_or_none, asked) if asked else None

    def allowed_drafts(self, row: Row, row_id: RowId, drafts: bytes) -> bytes:
        """The first of these guesses that the row's grammar takes behind what is known. Not while masks are worked
        out."""
        if row_id not in self._of_rows or not drafts:
            return drafts
        matcher = self._of_rows[row_id].behind(_output(row, row.num_known))
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
        found = self._fill([(ask, self._of_rows[ask.row].behind(ask.output)) for ask in asked])
        worn = [ask for ask in asked if found[ask.row] is None]
        return found | self._fill([(ask, self._of_rows[ask.row].renewed(ask.output)) for ask in worn])

    def _fill(self, wanted: Sequence[tuple[_Ask, LLMatcher | None]]) -> dict[RowId, npt.NDArray[np.uint32] | None]:
        """Masks by these matchers."""
        masks = np.full((sum(1 + len(ask.drafts) for ask, _ in wanted), self._num_words), _ALL, np.uint32)
        firsts = [*accumulate((1 + len(ask.drafts) for ask, _ in wanted), initial=0)]
        placed = [(m, first, ask.drafts) for (ask, m), first in zip(wanted, firsts, strict=False) if m is not None]
        plain = [(matcher, first) for matcher, first, drafts in placed if not drafts]
        guessed = [each for each in placed if each[2]]
        where = masks.ctypes.data, self._num_words * masks.itemsize, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)
        found: dict[RowId, npt.NDArray[np.uint32] | None] = {}
        for (ask, matcher), (first, end) in zip(wanted, pairwise(firsts), strict=True):
            is_of_use = matcher is not None and not matcher.is_error() and bool(masks[first].any())
            found[ask.row] = masks[first:end] if is_of_use else None
        return found


def _output(row: Row, end: int) -> bytes:
    """Packed ids that a row has drawn since the client's prompt, up to a position."""
    return row.tokens(row.prompt_len, end).astype("<u4").tobytes()


def _drafts_of(item: PlanItem) -> list[int]:
    if not item.num_drafts or not isinstance(item.inputs, TokenValues):
        return []
    return list(unpack_u32(item.inputs.tokens[item.num_known * TOKEN_BYTES :]))
