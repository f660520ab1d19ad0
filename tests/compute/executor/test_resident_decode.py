"""Runs of decode steps: what is told and learned of rows that go on as they are, and what ends a run."""

from dataclasses import replace

import numpy as np
import pytest

from deltaserve.compute.executor.launched import StepClock
from deltaserve.compute.executor.resident_decode import LaunchedRun, ResidentDecode
from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import (
    DecodePart,
    DecodeRows,
    ItemOutcome,
    PageUpdate,
    PlanItem,
    PlanItems,
    RowOpen,
    StepPlan,
    StepResult,
    TokenOf,
    TokenValues,
    WorkList,
)
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from tests.compute.executor.test_step_graphs import VOCAB, Replaying

WORK = WorkList(16)
PROMPT_LEN = 3


class Decoding:
    """Three rows behind prompts of 3 tokens. A row draws its token and 1,000 times its position (see Sums)."""

    def __init__(self) -> None:
        self.world = Replaying.of(8)
        self.decode = ResidentDecode(self.world.graphs, self.world.rows, VOCAB, StepClock())
        self.rows: dict[RowId, Row] = {}
        self.steps = 0
        for row in range(3):
            rules = SamplingParams(max_tokens=9, seed=row, temperature=0.0)
            opened = RowOpen(RowId(row), rules, pack_u32([1] * PROMPT_LEN), PROMPT_LEN)
            self.rows[RowId(row)] = Row(opened, 100, VOCAB)
            self.decode.open(opened, self.rows[RowId(row)])

    def begin(self, *rows: int) -> DecodePart:
        """A first step by value, and a second one that names the rows. Returns what the plan said."""
        start = PROMPT_LEN
        items = [PlanItem(RowId(row), start, 1, TokenValues(pack_u32([row])), True) for row in rows]
        assert self.launch(StepPlan(self.next(), tuple(items), WORK)) == [row + 1000 * start for row in rows]
        named = DecodeRows(tuple(map(RowId, rows)), tuple(start for _ in rows), (), ())
        return DecodePart(named, 1, StepIndex(self.steps))

    def next(self) -> StepIndex:
        self.steps += 1
        return StepIndex(self.steps)

    def plan(self, decode: DecodePart) -> StepPlan:
        return StepPlan(self.next(), PlanItems(decode, ()), WORK, decode=decode)

    def launch(self, plan: StepPlan) -> list[int] | None:
        """Tokens drawn."""
        found = self.result(plan)
        return None if found is None else [item.drawn[0].token for item in found.of_all(plan)]

    def result(self, plan: StepPlan) -> StepResult | None:
        launched = self.decode.launch(plan, self.rows, 0.0)
        assert launched is None or isinstance(launched, LaunchedRun)
        return None if launched is None else launched.wait()

    def silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.world.rows, "_tell", None)


def sums(starts: list[int], positions: range) -> list[int]:
    """What rows draw that began with such tokens and computed these positions."""
    return [(start + 1000 * sum(positions)) % VOCAB for start in starts]


def test_rows_that_go_on_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Decoding()
    decode = world.begin(0, 2)
    assert world.launch(world.plan(decode)) == sums([0, 2], range(3, 5))
    world.silence(monkeypatch)
    monkeypatch.setattr(PlanItems, "_items", None)  # nor is any item made
    for clock in range(2, 6):
        plan = world.plan(replace(decode, clock=clock, drawn_in=StepIndex(world.steps)))
        assert world.decode.goes_on(plan)
        found = world.result(plan)
        assert found is not None and found.decoded is not None
        assert list(unpack_u32(found.decoded)) == sums([0, 2], range(3, 4 + clock))
        assert found.tokens_read == 2 * (4 + clock)


def test_new_pages_are_told_and_the_run_goes_on() -> None:
    world = Decoding()
    decode = world.begin(1)
    world.launch(world.plan(decode))
    update = PageUpdate(RowId(1), PoolId(0), 2, (PageId(6),))
    world.world.rows._of_host[0][1, 2] = 6
    world.world.rows.write_pages([update])
    plan = replace(world.plan(replace(decode, clock=2, drawn_in=StepIndex(2))), pages=(update,))
    assert world.decode.goes_on(plan)
    assert world.launch(plan) == sums([1], range(3, 6))
    assert world.world.rows.on_device(1).tables[0][1].tolist() == [0, 0, 6, 0, 0, 0, 0, 0, 0]


def test_more_room_is_found_within_a_run() -> None:
    world = Decoding()
    decode = world.begin(0, 1, 2)
    for clock in range(1, 10):
        found = world.launch(world.plan(replace(decode, clock=clock, drawn_in=StepIndex(world.steps))))
        assert found == sums([0, 1, 2], range(3, 4 + clock))
    assert world.world.rooms.made == [(4, 4), (4, 8), (4, 16)]


def test_a_row_that_leaves_a_run_has_its_last_token_on_the_device() -> None:
    world = Decoding()
    decode = world.begin(0, 1, 2)
    world.launch(world.plan(decode))
    last = StepIndex(world.steps)
    assert all(row.is_on_device(last) and not row.is_on_device(StepIndex(1)) for row in world.rows.values())
    item = PlanItem(RowId(1), 5, 1, TokenOf(last), True)
    assert world.launch(StepPlan(world.next(), (item,), WORK)) == sums([1], range(3, 6))
    assert world.rows[RowId(0)].is_on_device(last) and world.rows[RowId(1)].is_on_device(StepIndex(world.steps))
    items = [PlanItem(RowId(row), 5 + row, 1, TokenOf(StepIndex(last + row)), True) for row in (0, 1)]
    assert world.launch(StepPlan(world.next(), tuple(items), WORK)) == [
        *sums([0], range(3, 6)),
        *sums([1], range(3, 7)),
    ]


def test_a_row_may_go_on_by_value_behind_tokens_that_nobody_read() -> None:
    world = Decoding()
    decode = world.begin(0)
    world.launch(world.plan(decode))
    item = PlanItem(RowId(0), 5, 1, TokenValues(pack_u32([9])), True)
    assert world.launch(StepPlan(world.next(), (item,), WORK)) == [9 + 5000 - VOCAB]


def test_other_steps_are_no_runs() -> None:
    world = Decoding()
    decode = world.begin(0, 1)
    plan = world.plan(decode)
    world.launch(plan)
    again = world.plan(replace(decode, clock=2, drawn_in=StepIndex(2)))
    assert world.decode.goes_on(again)
    prompt = PlanItem(RowId(2), 0, 3, TokenValues(pack_u32([1, 1, 1])), True)
    others = (
        replace(again, decode=replace(decode, clock=3)),
        replace(again, decode=None, items=tuple(again.items)),
        replace(again, items=PlanItems(decode, (prompt,))),
    )
    assert [world.decode.goes_on(other) for other in others] == [False] * 3
    assert world.launch(others[2]) is None
    assert not world.decode.goes_on(again), "a step of another kind came between"


def test_logits_that_are_not_finite_are_told_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Decoding()
    decode = world.begin(0, 1, 2)
    draw = world.world.graphs.draw

    def spoiled(*of_step: object) -> object:
        found = draw(*of_step)  # type: ignore[arg-type]
        assert found is not None
        found[1, 1] = 0
        return found

    monkeypatch.setattr(world.world.graphs, "draw", spoiled)
    found = world.result(world.plan(decode))
    assert found is not None and found.decoded is None
    assert [item.outcome for item in found.items] == [
        ItemOutcome.COMPUTED,
        ItemOutcome.NOT_FINITE,
        ItemOutcome.COMPUTED,
    ]
    assert [len(item.drawn) for item in found.items] == [1, 0, 1]


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    world = Decoding()
    item = PlanItem(RowId(0), 3, 1, TokenValues(np.array([VOCAB], "<u4").tobytes()), True)
    with pytest.raises(Exception, match="beyond the vocabulary"):
        world.launch(StepPlan(world.next(), (item,), WORK))
