"""Rows with penalties, biases and least lengths in recorded steps: whatever comes between, they draw what the host
draws for them step by step. The model's logits follow from token and position alone, so that steps are quick."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltaserve.compute.executor.launched import Launched
from deltaserve.compute.executor.resident_decode import LaunchedRun
from deltaserve.compute.executor.row_rules import DrawKind, WayToDraw
from deltaserve.compute.executor.runner import TorchExecutor
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.layers.decoder import Hidden
from deltaserve.compute.layers.step_ops import Peaks, unread_peaks
from deltaserve.control.sched.plan import (
    DecodePart,
    DecodeRows,
    ItemOutcome,
    PlanItem,
    PlanItems,
    StepPlan,
    TokenOf,
    TokenValues,
)
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.layout.shard import Shard
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32
from deltaserve.model.drafts.draft_algorithm import draft_algorithm
from deltaserve.model.model_spec import ModelSpec
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import needs_triton
from tests.compute.executor.adjusted_draws import NEEDS, WAYS
from tests.compute.executor.test_launched import rules
from tests.compute.executor.test_step_graphs import Rooms
from tests.compute.executor.world import VOCAB_SIZE, Driver, random_tokens

LIKELY = 12
"""Tokens that are drawn more often than others."""
MAX_LINES = 5
MAX_LEN = 60
RULES: tuple[dict[str, Any], ...] = (
    *({**needs, **way} for needs in NEEDS for way in WAYS),
    {"temperature": 0.7, "logprobs": 1},
    {"temperature": 0.0, "bad_words": ((2, 3), (5,)), "frequency_penalty": 0.7},
)
BY_HOST = len(RULES) - 2
"""Rules from here on are the host's."""
PENALISED = len(WAYS) + 1


class Chances:
    """In place of a decoder."""

    shard = Shard(0, 1)
    is_in_group = counts_on_host = False

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.local = spec, spec.local(self.shard)
        made = torch.Generator().manual_seed(7)
        self._of_tokens = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=made)
        self._of_positions = torch.randn(7, VOCAB_SIZE, generator=made)
        self._of_positions[:, :LIKELY] += 3.0

    def forward(self, tokens: Tensor, positions: Tensor, *_: object) -> Hidden:
        normed = torch.stack((tokens, positions), 1)
        return Hidden(normed, normed, None)

    def stored_logits(self, hidden: Tensor) -> Tensor:
        tokens, positions = hidden.select(1, 0), hidden.select(1, 1) % 7
        logits = self._of_tokens.index_select(0, tokens) + self._of_positions.index_select(0, positions)
        return torch.cat((logits, logits[:, :3] + 1e4), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stored_logits(hidden)[:, :VOCAB_SIZE].contiguous()

    def peaks(self, logits: Tensor) -> Peaks:
        is_finite, largest = unread_peaks(logits)
        return Peaks(is_finite.tolist(), largest.tolist())

    def settle(self, hidden: Hidden, lens: Sequence[int]) -> None:
        assert not lens


class Steps(Rooms):
    """In place of attention, which nobody asks for."""

    def begin_step(self, batch: object) -> tuple[()]:
        return ()

    begin_states = begin_step

    def shared_tokens_read(self, batch: object) -> int:
        return 0

    def free_scratch(self) -> None:
        pass


def _loaded(path: Path, spec: ModelSpec, cache: Any, sizes: Any, *_: object) -> TorchExecutor:
    decoder: Any = Chances(spec)
    make_drafter = draft_algorithm(sizes.drafts).make_drafter
    drafter = None if make_drafter is None else make_drafter()
    with patch("deltaserve.compute.executor.runner.make_attention", lambda *_: Steps()):
        return TorchExecutor(decoder, cache, sizes, torch.device("cpu"), None, drafter)


class OneByOne(Driver):
    """Its host draws all tokens of a step before it plans the next."""

    def __init__(self, path: Path) -> None:
        with patch.object(TorchExecutor, "load", _loaded):
            Driver.__init__(self, path, num_pages=400)
        self.plans: list[StepPlan] = []
        self.results: list[Any] = []

    def run(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.results.append(self.executor.execute(plan))

    def drawn_in(self, step: int, row: int) -> int:
        (token,) = [item.drawn[0].token for item in self.results[step].of_all(self.plans[step]) if item.row == row]
        return int(token)


class Failing(StepTape):
    """Its recordings fail from one on."""

    def __init__(self, num_good: int) -> None:
        StepTape.__init__(self)
        self._num_good = num_good

    def record(self, run: Any) -> Any:
        replay = StepTape.record(self, run)  # which computes the step, as a capture that fails may have
        if self.num_recorded > self._num_good:
            raise RuntimeError("no more")
        return replay


class Ahead(OneByOne):
    """Steps are recorded, and launched before what the one before drew is read."""

    graph_rows = 4

    def __init__(self, path: Path, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self.launched: list[Any] = []
        OneByOne.__init__(self, path)

    def recorder(self, device: torch.device) -> StepRecorder:
        return self._recorder

    def run(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.launched.append(self.executor.launch(plan))

    def drawn_in(self, step: int, row: int) -> int:
        self.results = [launched.wait() for launched in self.launched]
        return OneByOne.drawn_in(self, step, row)


class Guessing(Ahead):
    drafts = "NGRAM"


@dataclass(frozen=True)
class Move:
    """Steps of the same rows, one after the other."""

    lines: frozenset[int]
    num_steps: int
    joins: int | None
    """Rules of a row that begins beside the first step."""
    leaves: int | None
    begins_anew: int | None
    """A line whose request is opened again with what it has, as after a retraction."""
    by_value: bool
    in_parts: bool = False
    """Whether the prompt of who joins is computed in two steps."""


@dataclass
class Request:
    sampling: SamplingParams
    prompt: list[int]
    end: int
    """Position that it computes next."""
    steps: list[int] = field(default_factory=list)
    """Those in which it drew."""


class Play:
    """Plays moves, and knows what each request drew."""

    def __init__(self, driver: OneByOne) -> None:
        self.driver = driver
        self.lines: dict[int, Request] = {}
        self.ended: list[list[int]] = []
        self.tokens: dict[int, list[int]] = {}

    def play(self, moves: Sequence[Move]) -> list[list[int]]:
        for number, move in enumerate(moves):
            self._move(move, number)
        for line in sorted(self.lines):
            self._end(line)
        return self.ended

    def _end(self, line: int) -> None:
        self.ended.append(self._drawn(line))
        del self.lines[line]
        self.driver.free += self.driver.pages.pop(line)

    def _drawn(self, line: int) -> list[int]:
        return [self.driver.drawn_in(step, line) for step in self.lines[line].steps]

    def _move(self, move: Move, number: int) -> None:
        closes = []
        if move.leaves in self.lines and move.leaves is not None:
            self._end(move.leaves)
            closes.append(move.leaves)
        going = [line for line in sorted(move.lines) if line in self.lines and self.lines[line].end + 5 < MAX_LEN]
        if move.begins_anew in going and move.begins_anew is not None:
            self._begin_anew(move.begins_anew)
            closes.append(move.begins_anew)
        anew = closes[-1:] if move.begins_anew in closes else []
        items = [self._item(line, move.by_value or line in anew) for line in going]
        free = [line for line in range(MAX_LINES) if line not in self.lines and line not in closes]
        if move.joins is not None and free:
            joining = self._joining(free[0], move.joins, number)
            if move.in_parts and joining.q_len > 1:
                self._step([replace(_part(joining, 0, 1), samples=False)], closes)
                joining, closes = _part(joining, 1, joining.q_len), []
            items.append(joining)
        self._step(items, closes)
        if going and len(going) == len(items):
            self._go_on(going, move.num_steps)

    def _step(self, items: Sequence[PlanItem], closes: Sequence[int] = ()) -> None:
        for item in items:
            self.lines[item.row].steps += [self.driver.steps] if item.samples else []
            self.lines[item.row].end = item.q_start + item.q_len
        self.driver.step(items, closes=closes)

    def _item(self, line: int, by_value: bool) -> PlanItem:
        request = self.lines[line]
        step = request.steps[-1]
        value = TokenValues(pack_u32([self.driver.drawn_in(step, line)])) if by_value else TokenOf(StepIndex(step))
        return PlanItem(RowId(line), request.end, 1, value, True)

    def _begin_anew(self, line: int) -> None:
        request = self.lines[line]
        tokens = request.prompt + self._drawn(line)
        self.driver.free += self.driver.pages.pop(line)
        self.driver.open(line, tokens, request.sampling, 64, prompt_len=len(request.prompt))

    def _joining(self, line: int, of_rules: int, seed: int) -> PlanItem:
        prompt = [token % LIKELY for token in random_tokens(1 + seed % 4, seed)]
        self.lines[line] = Request(rules(seed, **RULES[of_rules]), prompt, 0)
        self.driver.open(line, prompt, self.lines[line].sampling, 64)
        return PlanItem(RowId(line), 0, len(prompt), TokenValues(pack_u32(prompt)), True)

    def _go_on(self, lines: Sequence[int], num_steps: int) -> None:
        """A run, planned as such."""
        driver, requests = self.driver, [self.lines[line] for line in lines]
        bases = tuple(request.end - driver.steps for request in requests)
        named = DecodeRows(tuple(map(RowId, lines)), bases, (), ())
        for _ in range(num_steps - 1):
            decode = DecodePart(named, driver.steps, StepIndex(driver.steps - 1))
            for request in requests:
                request.steps.append(driver.steps)
                request.end += 1
            driver.run(replace(driver.planned(()), items=PlanItems(decode, ()), decode=decode))


def _part(item: PlanItem, start: int, end: int) -> PlanItem:
    assert isinstance(item.inputs, TokenValues)
    tokens = TokenValues(item.inputs.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
    return replace(item, q_start=start, q_len=end - start, inputs=tokens)


LINES = st.none() | st.integers(0, MAX_LINES - 1)
MOVES = st.builds(
    Move,
    lines=st.frozensets(st.integers(0, MAX_LINES - 1)) | st.just(frozenset(range(MAX_LINES))),
    num_steps=st.integers(1, 4),
    joins=st.none() | st.integers(0, len(RULES) - 1),
    leaves=st.none() | st.none() | LINES,
    begins_anew=st.none() | LINES,
    by_value=st.booleans(),
    in_parts=st.booleans(),
)


def move(*lines: int, num_steps: int = 4, joins: int | None = None, leaves: int | None = None) -> Move:
    return Move(frozenset(lines), num_steps, joins, leaves, begins_anew=None, by_value=False)


def both(path: Path, moves: Sequence[Move], num_good: int = 100) -> Ahead:
    """Check the moves. Returns who launched."""
    want = Play(OneByOne(path)).play(moves)
    ahead = Ahead(path, Failing(num_good))
    assert Play(ahead).play(moves) == want
    return ahead


@needs_triton
@given(moves=st.lists(MOVES, min_size=3, max_size=14), num_good=st.integers(0, 6) | st.just(100))
@settings(max_examples=60, deadline=None)
def test_rows_draw_what_the_host_draws(tiny_models: Path, moves: list[Move], num_good: int) -> None:
    both(tiny_models / "llama", moves, num_good)


@needs_triton
@pytest.mark.parametrize("of_rules", range(len(WAYS), BY_HOST), ids=lambda index: "-".join(RULES[index]))
def test_no_step_waits_for_the_host(tiny_models: Path, of_rules: int) -> None:
    """All kinds of rules, beside another row, behind a prompt, and alone."""
    moves = (
        move(joins=of_rules),
        move(0, num_steps=3, joins=1),
        *(move(0, 1), move(0, joins=of_rules), move(0, 1, 2), move(2, 1), move(0)),
    )
    ahead = both(tiny_models / "llama", moves)
    for plan, launched in zip(ahead.plans, ahead.launched, strict=True):
        is_decoding = all(item.is_decode for item in plan.items)
        assert type(launched) is (LaunchedRun if is_decoding else Launched), plan.step


@needs_triton
def test_a_request_has_none_of_the_counts_of_the_one_before(tiny_models: Path) -> None:
    moves = [move(joins=PENALISED)]
    for _ in range(4):
        moves += [move(0, num_steps=8), move(joins=PENALISED, leaves=0)]
    both(tiny_models / "llama", [one for one in moves for _ in range(1 + (one.leaves is None))])


@needs_triton
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_stops_are_drawn_from_the_least_length_on(tiny_models: Path, num_steps: int) -> None:
    """However many tokens are drawn in runs before."""
    least = next(index for index, of in enumerate(RULES) if "min_tokens" in of)
    both(tiny_models / "llama", (move(joins=least), move(0, num_steps=num_steps), move(0, joins=0), move(0), move(0)))


@needs_triton
def test_a_step_that_fails_has_tokens_counted_anew(tiny_models: Path) -> None:
    """The row that is in no failed step goes on as if nothing had been."""
    path = tiny_models / "llama"
    before, after = (move(joins=PENALISED), move(0), move(joins=1)), (move(0), move(0))
    want = Play(OneByOne(path)).play((*before, *after))
    ahead = Ahead(path, Failing(100))
    play = Play(ahead)
    for number, one in enumerate(before):
        play._move(one, number)
    with patch.object(ahead.executor._resident, "prepare", side_effect=RuntimeError("no memory")):
        ahead.step([PlanItem(RowId(1), play.lines[1].end, 1, TokenOf(StepIndex(play.lines[1].steps[-1])), True)])
    assert ahead.launched[-1].wait().items[0].outcome is ItemOutcome.FAILED
    assert not ahead.executor._rows[RowId(0)].num_counted
    assert play.play(after)[0] == want[0]


@needs_triton
def test_a_recording_that_fails_within_a_run_ends_it(tiny_models: Path) -> None:
    """The step goes on as one that is launched by itself."""
    moves = (move(joins=0), move(joins=PENALISED), move(0, num_steps=1), move(0, 1, num_steps=4), move(0, 1))
    for num_good in range(5):
        ahead = both(tiny_models / "llama", moves, num_good)
        assert all(type(launched) in (Launched, LaunchedRun) for launched in ahead.launched)


@needs_triton
@pytest.mark.parametrize("of_rules", range(2 * len(WAYS), 3 * len(WAYS)))
def test_the_last_token_of_a_prompt_is_not_one_of_the_answer(tiny_models: Path, of_rules: int) -> None:
    """Also where the step that computes it alone was to be recorded, and could not be."""
    joining = replace(move(joins=of_rules), in_parts=True)  # as the second move it has two tokens
    both(tiny_models / "llama", (move(joins=0), joining, *(move(1) for _ in range(4))), num_good=2)


@needs_triton
def test_steps_whose_logits_are_changed_are_recorded_as_one_kind(tiny_models: Path) -> None:
    """However their rows draw from them."""
    moves = []
    for place, of_rules in enumerate(range(len(WAYS), 2 * len(WAYS))):
        moves += [move(joins=of_rules, leaves=1 - place % 2), move(0, 1)]
    recorded = both(tiny_models / "llama", moves).executor._recorded
    assert recorded is not None
    (bucket,) = recorded.drawing._buckets.values()
    assert list(bucket.replays) == [DrawKind(WayToDraw.LIMITED, is_adjusted=True)]


@needs_triton
def test_where_texts_are_guessed_rows_are_in_no_run(tiny_models: Path) -> None:
    """Who guesses reads all that was drawn, which the host does not learn of a run. Steps are launched nevertheless."""
    path = tiny_models / "llama"
    moves = (move(joins=1), move(joins=PENALISED), move(0, 1), move(0))
    guessing = Guessing(path, StepTape())
    assert Play(guessing).play(moves) == Play(OneByOne(path)).play(moves)
    assert all(type(launched) is Launched for launched in guessing.launched)


@needs_triton
def test_tables_are_made_for_the_first_such_row(tiny_models: Path) -> None:
    ahead = both(tiny_models / "llama", (move(joins=1), move(0)))
    assert ahead.executor._resident.adjustments._tables is None
