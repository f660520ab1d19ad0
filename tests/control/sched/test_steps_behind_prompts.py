"""Steps planned while another one computes chunks of prompts: where each row goes on is known before that one ends."""

from typing import Any

import pytest

from deltaserve.control.sched.plan import ItemResult, PlanItem, Sampled, StepPlan, StepResult, TokenOf, TokenValues
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.tokens import pack_u32
from tests.control.sched import toys
from tests.control.sched.toys import Bench, make_request, page_lists

PROMPT = [*range(100, 110)]


def config(**changes: Any) -> SchedConfig:
    """A device that computes beside the host."""
    return toys.config(plans_behind_prompts=True, **changes)


def planned(bench: Bench) -> list[PlanItem]:
    """The items of a further step; none where there is none."""
    steps = bench.scheduler.steps
    plan = steps.plan() if steps.has_work() else None
    return [] if plan is None else list(plan.items)


def commit_first(bench: Bench, plan: StepPlan) -> None:
    """What sampled has drawn a token; what extends computed is handed over."""
    items = tuple(ItemResult(item.row, (Sampled(7),) if item.samples else ()) for item in plan.items)
    for progress in bench.scheduler.steps.commit(StepResult(plan.step, items).compact(plan)):
        bench.scheduler.share_step(progress.request, is_extend=progress.is_extend)
    bench.scheduler.running.check_integrity()
    bench.cache.check_integrity()


def admitted(bench: Bench, *requests: Request) -> None:
    bench.add(*requests)
    assert bench.scheduler.waiting.admit(0.0) == [*requests]


def enter_without_the_tree(bench: Bench, request: Request) -> None:
    """It computes all of its prompt, whatever the tree has and whoever computes the same."""
    request.lease = bench.cache.lease(bench.cache.match(request.namespace, b"", b"", 0))
    pages = bench.budget.allocate(bench.scheduler.running.needs.beside(request.lease, request.num_tokens))
    assert pages is not None
    request.own(pages, (0,))
    bench.scheduler.running.enter(request)


def test_chunks_go_on_behind_each_other_and_decoding_behind_the_last() -> None:
    bench = Bench(config(num_ahead=3, chunk_len=4, step_len=4))
    request = make_request(PROMPT, max_tokens=50)
    admitted(bench, request)
    plans = [bench.scheduler.steps.plan() for _ in range(4)]
    under_way = [plan for plan in plans if plan is not None]
    spans = [(item.q_start, item.q_len, item.samples) for plan in under_way for item in plan.items]
    assert spans == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    inputs = [item.inputs for plan in under_way for item in plan.items]
    assert inputs[:3] == [TokenValues(pack_u32(PROMPT[start : start + 4])) for start in (0, 4, 8)]
    assert inputs[3] == TokenOf(under_way[2].step)
    assert not bench.scheduler.steps.has_work(), "as many as may be"
    for plan in under_way:
        commit_first(bench, plan)
    assert (request.num_tokens, request.num_computed) == (12, 11)
    bench.scheduler.finish(request)
    bench.check_empty()


def test_who_comes_meanwhile_goes_beside_the_next_chunk() -> None:
    bench = Bench(config(num_ahead=1, chunk_len=8, step_len=16))
    first, second = make_request(range(20), max_tokens=5), make_request(range(50, 56), max_tokens=5)
    admitted(bench, first)
    assert [(item.row, item.q_len) for item in planned(bench)] == [(first.row, 8)]
    admitted(bench, second)
    assert [(item.row, item.q_start, item.q_len) for item in planned(bench)] == [(first.row, 8, 8), (second.row, 0, 6)]


@pytest.mark.parametrize(("changes", "goes_on"), [({}, True), ({"ends_with_prompt": True}, False)])
def test_prefill_computes_nothing_behind_the_last_chunk(changes: dict[str, bool], goes_on: bool) -> None:
    bench = Bench(config(num_ahead=2, **changes))
    first, second = make_request(range(6), max_tokens=5), make_request(range(50, 70), max_tokens=5)
    admitted(bench, first, second)
    assert [(item.row, item.samples) for item in planned(bench)] == [(first.row, True), (second.row, False)]
    rows = {item.row for item in planned(bench)}
    assert rows == ({first.row, second.row} if goes_on else {second.row})


def test_the_last_token_of_all_is_not_gone_on_behind() -> None:
    bench = Bench(config(num_ahead=2))
    admitted(bench, make_request(range(6), max_tokens=1))
    assert len(planned(bench)) == 1
    assert planned(bench) == []


@pytest.mark.parametrize("retention", [Retention(Lifetime.WINDOW, 9), Retention(Lifetime.STATE)])
def test_where_pages_move_on_with_a_prompt_its_steps_wait(retention: Retention) -> None:
    bench = Bench(config(num_ahead=2), (64, 64), (KEEP_ALL, retention))
    admitted(bench, make_request(range(30), max_tokens=5))
    assert len(planned(bench)) == 1
    assert not bench.scheduler.steps.has_work()


def test_pages_that_a_step_behind_reads_are_changed_for_the_trees_when_it_is_over() -> None:
    """Both computed the same prompt; the second adopts the first one's pages when no step reads its own, and until then
    no further step names it."""
    bench = Bench(config(num_ahead=1, chunk_len=12, step_len=24))
    first, second = make_request(PROMPT, max_tokens=50), make_request([*PROMPT, 9], max_tokens=50)
    for request in (first, second):
        enter_without_the_tree(bench, request)
    under_way = [plan for _ in range(2) if (plan := bench.scheduler.steps.plan()) is not None]
    assert [[(item.row, item.q_start) for item in plan.items] for plan in under_way] == [
        [(first.row, 0), (second.row, 0)],
        [(first.row, 10), (second.row, 11)],
    ]
    before = page_lists(bench, second)
    commit_first(bench, under_way.pop(0))
    assert (first.lease and first.lease.num_pages, second.lease and second.lease.num_pages) == (2, 0)
    assert page_lists(bench, second) == before, "the step under way reads them"
    assert [item.row for item in planned(bench)] == [first.row]
    commit_first(bench, under_way.pop(0))
    assert first.lease is not None
    assert second.lease is not None
    assert second.lease.pages(0)[:2] == first.lease.pages(0)
    assert not second.late_to_share
    assert {item.row for item in planned(bench)} == {first.row, second.row}


def test_cores_that_compute_have_nothing_planned_behind_prompts() -> None:
    bench = Bench(toys.config(num_ahead=2, chunk_len=8))
    admitted(bench, make_request(range(12), max_tokens=5))
    assert planned(bench)
    assert not bench.scheduler.steps.has_work()


def test_what_is_to_be_adopted_stays_so_though_the_tree_loses_it() -> None:
    """Steps that name it are under way: none may be planned behind one that does not."""
    bench = Bench(config(num_ahead=3, chunk_len=4, step_len=8))
    first, second = make_request(PROMPT, max_tokens=50), make_request([*PROMPT, 9], max_tokens=50)
    admitted(bench, first)
    for _ in range(3):
        commit_first(bench, next(plan for plan in [bench.scheduler.steps.plan()] if plan is not None))
    bench.scheduler.finish(first)
    enter_without_the_tree(bench, second)
    under_way = [plan for _ in range(3) if (plan := bench.scheduler.steps.plan()) is not None]
    assert [item.samples for plan in under_way for item in plan.items] == [False, False, True]
    commit_first(bench, under_way.pop(0))
    assert second.late_to_share
    bench.cache.clear()
    assert planned(bench) == []
    commit_first(bench, under_way.pop(0))
    assert second.late_to_share
    assert planned(bench) == []
    commit_first(bench, under_way.pop(0))
    assert not second.late_to_share
    assert [item.q_start for item in planned(bench)] == [11]


def test_who_has_the_same_prompt_waits_though_its_answer_is_planned() -> None:
    bench = Bench(config(num_ahead=1, chunk_len=12))
    first, second = make_request(PROMPT, max_tokens=5), make_request([*PROMPT, 9], max_tokens=5)
    admitted(bench, first)
    under_way = [plan for _ in range(2) if (plan := bench.scheduler.steps.plan()) is not None]
    assert [item.q_start for plan in under_way for item in plan.items] == [0, 10]
    bench.add(second)
    assert bench.scheduler.waiting.admit(0.0) == []
    commit_first(bench, under_way.pop(0))
    assert bench.scheduler.waiting.admit(0.0) == [second]
    assert second.num_computed == 8


def test_a_second_long_prompt_goes_beside_what_is_left_of_the_first() -> None:
    bench = Bench(config(num_ahead=1, chunk_len=8, step_len=8))
    first, second = make_request(range(12), max_tokens=5), make_request(range(50, 70), max_tokens=5)
    bench.add(first, second)
    assert bench.scheduler.waiting.admit(0.0) == [first]
    assert [(item.row, item.q_len) for item in planned(bench)] == [(first.row, 8)]
    assert bench.scheduler.waiting.admit(0.0) == [second]
    assert [(item.row, item.q_len) for item in planned(bench)] == [(first.row, 4), (second.row, 4)]


def test_a_long_prompt_that_ended_under_its_chunk_keeps_nobody_waiting() -> None:
    bench = Bench(config(num_ahead=1, chunk_len=8, step_len=8))
    first, second = make_request(range(40), max_tokens=5), make_request(range(40), max_tokens=5)
    bench.add(first)
    assert bench.scheduler.waiting.admit(0.0) == [first]
    assert planned(bench)
    bench.add(second)
    assert bench.scheduler.waiting.admit(0.0) == []
    bench.scheduler.discard(first)
    bench.scheduler.waiting.look_again()
    assert bench.scheduler.waiting.admit(0.0) == [second]


def test_a_request_that_ends_under_its_chunks_gives_back_all_behind_the_last() -> None:
    bench = Bench(config(num_ahead=2, chunk_len=4, step_len=4))
    request = make_request(range(30), max_tokens=50)
    admitted(bench, request)
    under_way = [plan for _ in range(3) if (plan := bench.scheduler.steps.plan()) is not None]
    bench.scheduler.discard(request)
    for plan in under_way:
        assert request.row is not None
        commit_first(bench, plan)
        assert planned(bench) == []
    assert request.row is None
    bench.check_empty()
