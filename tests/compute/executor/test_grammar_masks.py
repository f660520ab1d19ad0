"""Rows with a grammar: what they draw is the grammar's, the same however they come to draw it, and nobody else's
matter."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from deltaserve.compute.executor.allowed_tokens import forbid, with_least_tokens
from deltaserve.compute.executor.grammar_masks import GrammarMasks
from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, PlanItem, RowOpen, TokenOf, TokenValues
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary, Compiled
from deltaserve.server.structured_output import any_grammar, regex_grammar
from tests.compute.executor.world import Driver, drawn, extend, random_tokens
from tests.fixtures.tiny_tokenizer import EOS_ID, byte_alphabet

PATTERN = "[0-9]{3}-(ab|cde)+;"
GRAMMAR = regex_grammar(PATTERN, "regex")
PROMPT = random_tokens(40, 3)


def params(grammar: str | None = GRAMMAR, **changes: Any) -> SamplingParams:
    plain = {"max_tokens": 60, "seed": 5, "temperature": 1.0, "stop_token_ids": (EOS_ID,), "grammar": grammar}
    return SamplingParams(**{**plain, **changes})


@pytest.fixture
def driver(tiny_models: Path) -> Driver:
    return Driver(tiny_models / "llama")


def plain(row: int, tokens: Sequence[int], start: int) -> PlanItem:
    """Computes `tokens` from `start` on, and draws."""
    return PlanItem(RowId(row), start, len(tokens) - start, TokenValues(pack_u32(tokens[start:])), True)


def answer(driver: Driver, row: int, sampling: SamplingParams, known: Sequence[int] = ()) -> list[int]:
    """All the row draws behind the prompt and what is known of its output, the end among it."""
    out = list(known)
    driver.open(row, [*PROMPT, *out], sampling, capacity=112, prompt_len=len(PROMPT))
    out.append(drawn(driver.step([plain(row, [*PROMPT, *out], 0)]).items[0]))
    while len(out) < sampling.max_tokens and out[-1] not in sampling.stop_token_ids:
        out.append(drawn(driver.step([driver.decode(row, len(PROMPT) + len(out) - 1)]).items[0]))
    return out


def text_of(tokens: Sequence[int]) -> str:
    assert tokens[-1] == EOS_ID
    return bytes(tokens[:-1]).decode()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}, {"frequency_penalty": 1.5}])
def test_an_answer_is_the_grammars_from_its_first_token_to_its_end(driver: Driver, changes: dict[str, Any]) -> None:
    for seed in range(3):
        assert re.fullmatch(PATTERN, text_of(answer(driver, seed, params(seed=seed, **changes))))


def test_a_row_that_resumes_behind_its_output_goes_on_as_it_would_have(driver: Driver) -> None:
    """What a retraction, a hand-over and a dead worker leave: the client's prompt, and the output so far."""
    whole = answer(driver, 0, params())
    for row, num_known in enumerate((1, 2, len(whole) // 2, len(whole) - 1), 1):
        driver.step([], closes=[row - 1])
        assert answer(driver, row, params(), whole[:num_known]) == whole


@pytest.mark.parametrize("num_wrong", [0, 1, 2])
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3}])
def test_guesses_change_nothing(driver: Driver, num_wrong: int, changes: dict[str, Any]) -> None:
    """Right ones, then one that the grammar refuses or would take."""
    whole = answer(driver, 0, params(**changes))
    driver.open(1, PROMPT, params(**changes))
    out = [drawn(driver.step([plain(1, PROMPT, 0)]).items[0])]
    while out[-1] != EOS_ID:
        guesses = whole[len(out) : len(out) + 3]
        if num_wrong:
            guesses[-1] = ord("#") if num_wrong == 1 else ord("7")
        inputs = TokenValues(pack_u32([out[-1], *guesses]))
        start = len(PROMPT) + len(out) - 1
        item = PlanItem(RowId(1), start, 1 + len(guesses), inputs, True, num_drafts=len(guesses))
        out += [sampled.token for sampled in driver.step([item]).items[0].drawn]
    assert out == whole


def test_logprobs_are_those_of_the_model(driver: Driver) -> None:
    driver.open(0, PROMPT, params(None, logprobs=5))
    driver.open(1, PROMPT, params(logprobs=5))
    free, ruled = (item.drawn[0] for item in driver.step([plain(0, PROMPT, 0), plain(1, PROMPT, 0)]).items)
    assert free.logprobs is not None and ruled.logprobs is not None
    assert ruled.logprobs.top == free.logprobs.top
    assert chr(ruled.token).isdigit()


def test_others_in_the_step_draw_what_they_would_alone(driver: Driver) -> None:
    driver.open(0, PROMPT, params(None, max_tokens=9))
    alone = driver.step([plain(0, PROMPT, 0)]).items[0]
    driver.open(1, PROMPT, params(None, max_tokens=9))
    driver.open(2, PROMPT, params())
    driver.open(3, PROMPT, params(any_grammar('root ::= "x"', "ebnf")))
    beside, ruled, only = driver.step([plain(row, PROMPT, 0) for row in (1, 2, 3)]).items
    assert drawn(beside) == drawn(alone)
    assert chr(drawn(ruled)).isdigit()
    assert drawn(only) == ord("x")


def test_the_least_length_yields_where_nothing_but_the_end_is_left(driver: Driver) -> None:
    choice = params(regex_grammar("a*|bb", "regex"), min_tokens=5, max_tokens=20, logit_bias=((98, 100.0),))
    assert answer(driver, 0, choice) == [98, 98, EOS_ID]
    longer = params(regex_grammar("a*", "regex"), min_tokens=5, max_tokens=20, logit_bias=((EOS_ID, 100.0),))
    assert answer(driver, 1, longer) == [97] * 5 + [EOS_ID]


@pytest.mark.parametrize("grammar", ["{", '{"grammars": [{"json_schema": {"not": {}}}]}', 'start: "a" b', ""])
def test_a_grammar_that_cannot_be_followed_ends_its_own_row(driver: Driver, grammar: str) -> None:
    """The front lets none of these through."""
    driver.open(0, PROMPT, params(grammar))
    driver.open(1, PROMPT, params())
    failed, other = driver.step([plain(0, PROMPT, 0), plain(1, PROMPT, 0)]).items
    assert failed == ItemResult(RowId(0), outcome=ItemOutcome.NO_GRAMMAR)
    assert other.outcome is ItemOutcome.COMPUTED
    assert chr(drawn(other)).isdigit()


def test_an_output_that_is_not_the_grammars_ends_its_row(driver: Driver) -> None:
    driver.open(0, [*PROMPT, ord("#")], params(), prompt_len=len(PROMPT))
    (result,) = driver.step([plain(0, [*PROMPT, ord("#")], 0)]).items
    assert result.outcome is ItemOutcome.NO_GRAMMAR


def test_proposed_guesses_end_where_the_grammar_does_not_take_them(driver: Driver) -> None:
    driver.open(0, PROMPT, params(), prompt_len=len(PROMPT))
    item = extend(0, PROMPT, 0, len(PROMPT))
    result = driver.step([item]).items[0]
    grammars, row = driver.executor._grammars, driver.executor._rows[RowId(0)]
    guesses = [*b"12-abX"] if len(result.drawn) == 1 else []
    assert unpack_u32(grammars.allowed_drafts(row, RowId(0), pack_u32(guesses))) == tuple(b"12-ab")


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 272, 1000])
@pytest.mark.parametrize("lines", [(0,), (1, 3), (0, 1, 2, 3)])
def test_forbidden_tokens_are_those_whose_bit_is_not_set(vocab: int, lines: tuple[int, ...]) -> None:
    generator = np.random.default_rng(vocab)
    masks = {line: generator.integers(0, 1 << 32, -(-vocab // 32), np.uint32) for line in lines}
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    expected = logits.clone()
    for line, mask in masks.items():
        for token in range(vocab):
            if not int(mask[token // 32]) >> token % 32 & 1:
                expected[line, token] = float("-inf")
    forbid(logits, masks)
    assert torch.equal(logits, expected)


def test_stop_ids_leave_the_mask_unless_they_are_all_of_it() -> None:
    sampling = params(min_tokens=4, stop_token_ids=(3, 40))
    mask = np.array([0b1001, 1 << 8], np.uint32)
    assert with_least_tokens(mask, sampling, 3).tolist() == [1, 0]
    assert with_least_tokens(mask, sampling, 4).tolist() == mask.tolist()
    only = np.array([0b1000, 0], np.uint32)
    assert with_least_tokens(only, sampling, 0).tolist() == only.tolist()


WEARING = regex_grammar("[ab]*a[ab]{18}", "regex")
"""The state of its lexer are the last letters: each answer adds thousands, of the 20,000 that a lexer may have."""
ENDLESS = regex_grammar("(([a-z]{1,100}){1,100}){1,100}", "regex")
"""An answer of it soon needs more of them than a lexer may have."""


class MasksAlone:
    """The masks of rows that draw any token allowed, without a model."""

    def __init__(self) -> None:
        words = ["".join(letters) for letters in product("ab", repeat=6)]
        vocab = {text: index for index, text in enumerate([*byte_alphabet(), *words, "<|eos|>"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|eos|>"])
        self.eos_id = len(vocab) - 1
        self.grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), len(vocab), (self.eos_id,)))
        self.masks = GrammarMasks(self.grammars, len(vocab))
        self.compiled: dict[str, list[Compiled]] = {WEARING: [], ENDLESS: []}
        """Grammar |-> all that were compiled of it."""

    def draw(self, grammars: Sequence[str], num_tokens: int, seed: int = 0) -> list[int]:
        """How many tokens a row of each drew until it had as many, or its grammar met a limit."""
        live: dict[RowId, Row] = {}
        for number, grammar in enumerate(grammars):
            opened = RowOpen(RowId(number), params(grammar), b"\1\0\0\0", 1)
            self.masks.open(opened)
            live[opened.row] = Row(opened, num_tokens + 1, self.eos_id + 1)
        draw, drawn = np.random.default_rng(seed), [0] * len(grammars)
        for step in range(num_tokens):
            items = [PlanItem(row, of.num_known - 1, 1, TokenOf(StepIndex(0)), True) for row, of in live.items()]
            future = self.masks.begin(items, live)
            for row, mask in (future.result() if future else {}).items():
                self._note(grammars[row])
                if mask is None:
                    del live[row]
                    continue
                allowed = np.nonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))[0]
                live[row].draw(StepIndex(step), live[row].num_known, int(draw.choice(allowed[allowed != self.eos_id])))
                drawn[row] += 1
        return drawn

    def _note(self, grammar: str) -> None:
        compiled, now = self.compiled[grammar], self.grammars.compile(grammar)
        if now not in compiled:
            compiled.append(now)


def test_rows_end_by_no_limit_that_others_met() -> None:
    """They share a lexer, which all of them together wear out."""
    alone = MasksAlone()
    for turn in range(4):
        assert alone.draw([WEARING] * 3, 40, seed=turn) == [40] * 3, turn
    assert 1 < len(alone.compiled[WEARING]) < 12


def test_a_row_whose_own_answer_needs_too_much_ends() -> None:
    """It is no matter of others, and its grammar is not compiled anew for each token."""
    alone = MasksAlone()
    drawn = alone.draw([ENDLESS, WEARING], 100)
    assert 0 < drawn[0] < 100
    assert drawn[1] == 100
    assert len(alone.compiled[ENDLESS]) <= 2 + drawn[0] // 8
