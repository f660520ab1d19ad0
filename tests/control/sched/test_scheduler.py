"""The scheduler step by step: chunks, budgets, rows, retraction, the tree, endings under a running step."""

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.sched.needs import Needs
from deltaserve.control.sched.plan import ItemResult, Sampled, StepPlan, StepResult
from deltaserve.control.sched.queue import MAX_WAIT_S, TryOutcome
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.sched.waiting import Claim, NoOwner
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace
from deltaserve.core.keys import extend_keys
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.wire.messages import CacheUse
from tests.control.cache.toys import LONG_WINDOW
from tests.control.sched.sharing import check_runs
from tests.control.sched.toys import Bench, config, make_request, page_lists, q_lens, seed_of


@pytest.mark.parametrize(("prompt_len", "chunks"), [(1, [1]), (8, [8]), (9, [8, 1]), (19, [8, 8, 3])])
def test_a_prompt_is_cut_at_page_multiples_and_sampled_after_its_last_chunk(prompt_len: int, chunks: list[int]) -> None:
    bench = Bench(config())
    bench.add(make_request(range(prompt_len), max_tokens=2))
    plans = [bench.step()[0] for _ in chunks]
    assert [q_lens(plan) for plan in plans] == [[n] for n in chunks]
    assert [plan.items[0].samples for plan in plans] == [False] * (len(chunks) - 1) + [True]
    starts = [plan.items[0].q_start for plan in plans]
    assert starts == [sum(chunks[:i]) for i in range(len(chunks))]
    assert q_lens(bench.step()[0]) == [1]


def test_chunks_end_at_absolute_multiples_after_a_hit() -> None:
    bench = Bench(config())
    first = make_request(range(8), max_tokens=1)
    bench.add(first)
    bench.step()
    bench.scheduler.finish(first)
    second = make_request([*range(6), *range(50, 70)], max_tokens=1)  # shares page 0 only
    bench.add(second)
    plan, _ = bench.step()
    assert (plan.items[0].q_start, plan.items[0].q_len) == (4, 8)


def test_a_step_takes_every_decode_row_and_extends_up_to_its_budget() -> None:
    bench = Bench(config(step_len=10))
    decoding = make_request([90, 91], max_tokens=9)
    bench.add(decoding)
    bench.step()
    prompts = [make_request(range(10 * i, 10 * i + 8), max_tokens=1) for i in range(1, 4)]
    bench.add(*prompts)
    plan, _ = bench.step()
    assert q_lens(plan) == [1, 8]  # 2 tokens are left: less than a page, and not the rest of a prompt
    assert q_lens(bench.step()[0]) == [1, 1, 8]


def test_a_short_rest_fits_into_what_is_left_of_a_step() -> None:
    bench = Bench(config(step_len=10))
    bench.add(make_request(range(8), max_tokens=1), make_request([50, 51], max_tokens=1))
    assert q_lens(bench.step()[0]) == [8, 2]


def test_rows_bound_the_batch() -> None:
    bench = Bench(config(max_running=2))
    bench.add(*(make_request([10 * i, 1], max_tokens=3) for i in range(3)))
    plan, _ = bench.step()
    assert (len(plan.items), len(bench.scheduler.running), len(bench.scheduler.waiting.queue)) == (2, 2, 1)


def test_a_match_leaves_one_token_to_compute() -> None:
    bench = Bench(config())
    first = make_request(range(8), max_tokens=1)
    bench.add(first)
    bench.step()
    bench.scheduler.finish(first)
    again = make_request(range(8), max_tokens=1)
    bench.add(again)
    plan, _ = bench.step()
    assert (plan.items[0].q_start, plan.items[0].q_len) == (4, 4)
    bench.scheduler.finish(again)
    bench.check_empty()


def test_namespaces_never_share() -> None:
    bench = Bench(config())
    first = make_request(range(8), max_tokens=1)
    bench.add(first)
    bench.step()
    bench.scheduler.finish(first)
    bench.add(make_request(range(8), max_tokens=1, namespace=Namespace("bob")))
    assert q_lens(bench.step()[0]) == [8]


def test_prompt_logprobs_match_nothing_and_are_asked_for_to_the_last_prompt_position() -> None:
    bench = Bench(config())
    first = make_request(range(12), max_tokens=2)
    bench.add(first)
    bench.step()
    bench.step()
    bench.scheduler.finish(first)
    request = make_request(range(12), max_tokens=2, prompt_logprobs=0)
    bench.add(request)
    plans = [bench.step()[0] for _ in range(3)]
    assert [q_lens(p) for p in plans] == [[8], [4], [1]]
    assert [p.items[0].wants_prompt_logprobs for p in plans] == [True, True, False]
    bench.scheduler.finish(request)
    bench.check_empty()


@pytest.mark.parametrize("use", [CacheUse.NORMAL, CacheUse.BYPASS])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_bypass_and_a_disabled_cache_leave_the_tree_empty(use: CacheUse, radix_cache: bool) -> None:
    bench = Bench(config(radix_cache=radix_cache))
    request = make_request(range(9), max_tokens=1, cache=use)
    bench.add(request)
    bench.step()
    bench.step()
    bench.scheduler.finish(request)
    is_cached = radix_cache and use is CacheUse.NORMAL
    assert bench.pools[0].count(PageState.CACHED) == (2 if is_cached else 0)
    bench.check_empty()


# ---------------------------------------------------------------- requests with equal prompts


def test_a_duplicate_waits_for_the_page_that_is_being_computed_and_takes_it_from_the_tree() -> None:
    bench = Bench(config())
    first, duplicate = (make_request([*range(16), 70 + i], max_tokens=2) for i in range(2))
    bench.add(first, duplicate)
    assert q_lens(bench.step()[0]) == [8]
    assert q_lens(bench.step()[0]) == [8]
    plan, _ = bench.step()
    assert sorted((i.q_start, i.q_len) for i in plan.items) == [(16, 1), (16, 1)]
    assert len(bench.scheduler.running) == 2


def test_a_waiting_duplicate_lets_others_pass_however_long() -> None:
    bench = Bench(config(max_running=20, step_len=200), num_pages=(200,))
    first, duplicate = (make_request([*range(80), 900 + i], max_tokens=1) for i in range(2))
    bench.add(first, duplicate)
    bench.scheduler.waiting.admit(0.0)
    strangers = [make_request([100 + i, 1], max_tokens=1) for i in range(12)]
    for at, stranger in enumerate(strangers):
        bench.add(stranger)
        assert bench.scheduler.waiting.admit(float(at)) == [stranger]
    assert duplicate in bench.scheduler.waiting.queue


def test_many_waiting_duplicates_do_not_hide_those_behind_them() -> None:
    bench = Bench(config(max_running=8), num_pages=(200,))
    duplicates = [make_request([*range(80), 900 + i], max_tokens=1) for i in range(30)]
    stranger = make_request([100, 101], max_tokens=1)
    bench.add(*duplicates, stranger)
    assert bench.scheduler.waiting.admit(0.0) == [duplicates[0], stranger]


def test_a_duplicates_pages_are_adopted_where_it_was_first() -> None:
    bench = Bench(config(step_len=64))
    first = make_request(range(12), max_tokens=4)
    late = make_request(range(12), max_tokens=4, prompt_logprobs=0)  # matches nothing: computes the same pages
    bench.add(first, late)
    bench.step()
    bench.step()
    assert page_lists(bench, first)[0][:3] == page_lists(bench, late)[0][:3]
    bench.step()
    for request in (first, late):
        assert request.row is not None
        assert bench.tables.rows[request.row][0] == page_lists(bench, request)[0]


# ---------------------------------------------------------------- memory


def test_overtaking_is_bounded() -> None:
    bench = Bench(config(max_running=2, step_len=64), num_pages=(8,))
    holder = make_request(range(20), max_tokens=1, cache=CacheUse.BYPASS)
    large = make_request(range(50, 80), max_tokens=1)
    bench.add(holder)
    bench.scheduler.waiting.admit(0.0)
    bench.add(large)
    passed = 0
    for _ in range(20):
        small = make_request([1], max_tokens=1)
        bench.add(small)
        if bench.scheduler.waiting.admit(0.0) == [small]:
            passed += 1
            bench.scheduler.discard(small)
    assert passed == 8
    bench.scheduler.discard(holder)
    assert bench.scheduler.waiting.admit(0.0)[0] is large


def test_the_reserve_keeps_room_for_decoding_but_not_against_a_lone_request() -> None:
    bench = Bench(config(reserve_len=8), num_pages=(10,))
    lone = make_request(range(20), max_tokens=30)
    bench.add(lone)
    assert bench.scheduler.waiting.admit(0.0) == [lone]
    other = make_request([50], max_tokens=30)
    bench.add(other)
    bench.step()
    bench.step()
    assert other in bench.scheduler.running  # 5 free: 1 taken, 2 for the output of each
    third = make_request([60], max_tokens=30)
    bench.add(third)
    assert bench.scheduler.waiting.admit(0.0) == []  # 4 free: 1 and 6 needed


def test_the_reserve_is_what_a_request_can_still_use() -> None:
    bench = Bench(config(reserve_len=100), num_pages=(8,))
    first, second = make_request(range(20), max_tokens=1), make_request([50, 51], max_tokens=2)
    bench.add(first, second)
    assert bench.scheduler.waiting.admit(0.0) == [first, second]


def test_after_a_retraction_more_is_kept_free() -> None:
    bench = Bench(config(reserve_len=4), num_pages=(7,))
    old = make_request(range(8), max_tokens=40, arrival=1.0)
    young = make_request(range(50, 58), max_tokens=40, arrival=2.0)
    bench.add(old, young)
    while not (retracted := bench.scheduler.running.take_retracted()):
        bench.step()
    assert retracted == [young]
    bench.add(young)
    assert bench.scheduler.waiting.admit(0.0) == []  # with a page each it would run, and be retracted again
    bench.scheduler.finish(old)
    assert bench.scheduler.waiting.admit(0.0) == [young]


# ---------------------------------------------------------------- steps ahead


def test_prompts_are_admitted_two_steps_ahead_of_their_computation() -> None:
    bench = Bench(config())
    prompts = [make_request(range(100 * i, 100 * i + 14), max_tokens=3) for i in range(4)]
    bench.add(*prompts)
    assert bench.scheduler.waiting.admit(0.0) == prompts[:3]  # 28 of 32 tokens are booked by two of them
    assert bench.pools[0].num_free == 64 - 3 * 4
    bench.step()
    assert bench.scheduler.waiting.admit(0.0) == [prompts[3]]


def test_one_prompt_longer_than_a_step_is_computed_at_a_time_and_short_ones_beside_it() -> None:
    bench = Bench(config(chunk_len=16))
    long, longer, short = (make_request(range(100 * i, 100 * i + n), max_tokens=3) for i, n in enumerate((90, 95, 6)))
    bench.add(long, longer, short)
    assert bench.scheduler.waiting.admit(0.0) == [long, short]
    plan, _ = bench.step()
    assert sorted(q_lens(plan)) == [6, 8]  # 10 left by the short one, in whole pages
    while long.num_tokens - long.num_computed > 16:
        assert longer not in bench.scheduler.running
        bench.step()
    bench.step()
    assert longer in bench.scheduler.running


def test_the_oldest_extend_goes_on_at_half_the_pace_beside_any_number_of_short_ones() -> None:
    bench = Bench(config(chunk_len=16, max_running=8), num_pages=(200,))
    long = make_request(range(90), max_tokens=3)
    bench.add(long)
    num_steps = 0
    while long.output_len == 0:
        bench.add(*(make_request([1000 + 100 * num_steps + 10 * i, 1], max_tokens=1) for i in range(8)))
        _, progress = bench.step()
        for item in progress:
            if item.request is not long and item.drawn:
                bench.scheduler.finish(item.request)
        num_steps += 1
    assert num_steps <= 12  # 90 tokens, 8 a step


def test_extends_take_a_bounded_part_of_a_step_that_has_decode_rows() -> None:
    bench = Bench(config(chunk_len=16, extend_len_beside_decode=4))
    row = make_request(range(8), max_tokens=30)
    bench.add(row)
    plan, _ = bench.step()
    assert q_lens(plan) == [8]
    bench.add(make_request(range(50, 66), max_tokens=3))
    plan, _ = bench.step()
    assert q_lens(plan) == [1, 4]


# ---------------------------------------------------------------- what waiting requests hold


def holding(bench: Bench, request: Request) -> Request:
    """The request leases what is cached of it, and waits elsewhere."""
    match = bench.cache.match(request.namespace, bytes(request.tokens), bytes(request.keys))
    request.lease = bench.cache.lease(match)
    bench.scheduler.waiting.hold(request)
    return request


def cached(bench: Bench, tokens: range, arrival: float) -> Request:
    first = make_request(tokens, max_tokens=1)
    bench.add(first)
    bench.step()
    bench.step()
    bench.scheduler.finish(first)
    return holding(bench, make_request(tokens, max_tokens=1, arrival=arrival))


def test_waiting_requests_yield_the_youngest_first_before_a_running_one_is_retracted() -> None:
    bench = Bench(config(), num_pages=(9,))
    older, younger = cached(bench, range(12), 1.0), cached(bench, range(50, 62), 2.0)
    row = make_request(range(90, 98), max_tokens=30, arrival=3.0)
    bench.add(row)
    while row.num_tokens <= 16:
        bench.step()
    assert bench.scheduler.waiting.holders.take_yielded() == [younger]
    assert (younger.lease, older.lease is None) == (None, False)
    while row.num_tokens <= 28:
        bench.step()
    assert bench.scheduler.waiting.holders.take_yielded() == [older]
    assert bench.scheduler.running.take_retracted() == []


def test_a_request_in_the_queue_is_not_made_to_yield_by_one_behind_it() -> None:
    bench = Bench(config(), num_pages=(8,))
    first = cached(bench, range(12), 1.0)
    first.origin = Origin.FETCHED
    bench.add(first)
    second = make_request(range(50, 80), max_tokens=1, arrival=2.0)
    bench.add(second)
    assert bench.scheduler.waiting.admit(0.0) == []
    assert first.lease is not None
    third = make_request(range(50, 80), max_tokens=1, arrival=0.5)
    third.is_urgent = True
    bench.add(third)
    assert bench.scheduler.waiting.admit(0.2) == [third]
    assert bench.scheduler.waiting.holders.take_yielded() == [first]


def test_the_youngest_is_retracted_and_what_it_computed_stays() -> None:
    bench = Bench(config(), num_pages=(6,))
    old = make_request(range(8), max_tokens=9, arrival=1.0)
    young = make_request(range(50, 58), max_tokens=9, arrival=2.0)
    bench.add(young, old)  # the order of arrival counts, not that of admission
    bench.step()
    assert len(bench.scheduler.running) == 2
    for _ in range(4):
        bench.step()
        assert bench.scheduler.running.take_retracted() == []
    plan, _ = bench.step()
    assert bench.scheduler.running.take_retracted() == [young]
    assert list(bench.scheduler.running) == [old]
    assert (young.num_computed, young.num_retractions, young.lease, young.owned) == (0, 1, None, ())
    assert len(plan.closes) == 1
    bench.add(young)
    bench.scheduler.finish(old)
    bench.scheduler.waiting.admit(0.0)
    assert young.num_computed >= 4  # a page of it was not evicted
    bench.scheduler.finish(young)
    bench.check_empty()


def test_a_lone_request_of_the_whole_pool_runs_to_its_end() -> None:
    bench = Bench(config(reserve_len=100), (5, 7), (KEEP_ALL, LONG_WINDOW))
    earlier = make_request(range(50, 62), max_tokens=1)
    bench.add(earlier)
    bench.step()
    bench.step()
    bench.scheduler.finish(earlier)
    request = make_request(range(11), max_tokens=9)
    bench.add(request)
    while request.output_len < 9:
        bench.step()
        assert bench.scheduler.running.take_retracted() == []
    bench.scheduler.finish(request)
    bench.check_empty()


class Keeper(NoOwner):
    """Says the same to everybody."""

    def __init__(self, claim: Claim) -> None:
        self.answer = claim
        self.asked: list[tuple[Request, int]] = []

    def may_start(self, request: Request) -> bool:
        return request.num_tokens < 50

    def claim(self, request: Request, cached_len: int) -> Claim:
        self.asked.append((request, cached_len))
        return self.answer


@pytest.mark.parametrize("claim", [Claim.NOTHING, Claim.SPARE])
def test_a_request_held_back_by_its_owner_takes_nothing_and_blocks_nobody(claim: Claim) -> None:
    bench = Bench(config(), num_pages=(6,))
    keeper = Keeper(claim)
    unasked, large, small = (make_request(range(n), max_tokens=1) for n in (60, 40, 5))
    bench.add(unasked, large, small)
    admitted = [small] if claim is Claim.SPARE else []
    assert bench.scheduler.waiting.admit(0.0, keeper) == admitted
    assert keeper.asked == [(large, 0), (small, 0)] if admitted else [(large, 0)]
    assert bench.cache.num_leases == len(admitted)


def test_memory_that_waiting_requests_hold_is_not_spare() -> None:
    bench = Bench(config(), num_pages=(6,))
    holder = cached(bench, range(16), 1.0)
    keeper = Keeper(Claim.SPARE)
    request = make_request(range(50, 62), max_tokens=1)
    bench.add(request)
    assert bench.scheduler.waiting.admit(0.0, keeper) == []
    keeper.answer = Claim.FULL
    bench.scheduler.waiting.look_again()
    assert bench.scheduler.waiting.admit(0.0, keeper) == [request]
    assert bench.scheduler.waiting.holders.take_yielded() == [holder]


def test_nobody_is_computed_ahead_while_one_that_is_asked_for_stalls_the_queue() -> None:
    """Not even those that came before it: two of them in turn would keep it out for ever."""
    bench = Bench(config(), num_pages=(6,))
    first, second = (make_request(range(n, n + 9), max_tokens=1, arrival=n / 100) for n in (0, 20))
    asked_for = make_request(range(40, 60), max_tokens=1, arrival=1.0)
    for request in (first, second, asked_for):
        request.is_urgent = True

    class ByRequest(Keeper):
        def claim(self, request: Request, cached_len: int) -> Claim:
            return Claim.FULL if request is asked_for else Claim.SPARE

    waiting, owner = bench.scheduler.waiting, ByRequest(Claim.SPARE)
    bench.add(first, asked_for)
    assert waiting.admit(0.0, owner) == [first]
    assert waiting.admit(MAX_WAIT_S, owner) == []
    bench.add(second)
    assert waiting.admit(MAX_WAIT_S + 0.1, owner) == []
    bench.scheduler.finish(first)
    assert waiting.admit(MAX_WAIT_S + 0.2, owner) == [asked_for]
    bench.scheduler.finish(asked_for)
    assert waiting.admit(MAX_WAIT_S + 0.3, owner) == [second]


@pytest.mark.parametrize("is_asked_for_later", [False, True])
def test_who_is_computed_ahead_makes_way_for_who_is_asked_for_though_it_came_first(is_asked_for_later: bool) -> None:
    """Seed 17958777313823 of the simulator: one that nobody had asked for came back to memory that the other's window
    was to move on to, and threw it out again and again."""
    bench = Bench(config(), num_pages=(5,))
    ahead = make_request(range(7), max_tokens=9, arrival=1.0)
    asked_for = make_request(range(50, 58), max_tokens=9, arrival=2.0)
    bench.add(ahead)
    assert bench.scheduler.waiting.admit(0.0, Keeper(Claim.SPARE)) == [ahead]
    bench.add(asked_for)
    assert bench.scheduler.waiting.admit(0.0, Keeper(Claim.FULL)) == [asked_for]
    ahead.is_ahead = not is_asked_for_later
    while not (retracted := bench.scheduler.running.take_retracted()):
        bench.commit(bench.plan())
    assert retracted == [asked_for if is_asked_for_later else ahead]


def test_nothing_is_tried_again_while_nothing_has_changed() -> None:
    bench = Bench(config())
    keeper = Keeper(Claim.NOTHING)
    bench.add(make_request(range(5), max_tokens=1))
    for now in (0.0, 0.01, 0.02):
        assert bench.scheduler.waiting.admit(now, keeper) == []
    assert len(keeper.asked) == 1
    bench.add(make_request(range(6), max_tokens=1))
    bench.scheduler.waiting.admit(0.03, keeper)
    assert len(keeper.asked) == 2  # the new one
    bench.scheduler.waiting.admit(0.5, keeper)  # not for ever: links come back
    assert len(keeper.asked) == 4


# ---------------------------------------------------------------- a step under way


@pytest.mark.parametrize("ending", ["finish", "discard"])
def test_a_request_that_ends_under_a_step_gives_its_pages_back_with_the_commit(ending: str) -> None:
    bench = Bench(config())
    request, other = make_request(range(6), max_tokens=5), make_request(range(50, 56), max_tokens=5)
    bench.add(request, other)
    bench.scheduler.waiting.admit(0.0)
    plan = bench.plan()
    held = bench.pools[0].count(PageState.OWNED)
    if ending == "finish":
        bench.scheduler.finish(request)
    else:
        bench.scheduler.discard(request)
    assert bench.scheduler.steps.is_in_flight(request)
    assert bench.pools[0].count(PageState.OWNED) == held
    progress = bench.commit(plan)
    assert [p.request for p in progress] == [other]
    assert request.row is None
    assert bench.pools[0].count(PageState.OWNED) + bench.pools[0].count(PageState.CACHED) == 2
    assert len(bench.step()[0].closes) == 1
    bench.scheduler.finish(other)
    bench.check_empty()


def draw_behind(bench: Bench, under_way: list[StepPlan]) -> None:
    """One more step is planned; the oldest of two that are under way is committed, shared by nobody."""
    ahead = bench.plan()
    for item in ahead.items:
        bench.tables.draw(ahead.step, item.row, 7)
    under_way.append(ahead)
    if len(under_way) == 2:
        commit_drawn(bench, under_way.pop(0))


def commit_drawn(bench: Bench, plan: StepPlan) -> None:
    """Each row has drawn a token."""
    items = tuple(ItemResult(item.row, (Sampled(7),)) for item in plan.items)
    bench.scheduler.steps.commit(StepResult(plan.step, items).compact(plan))


def cached_len(bench: Bench, request: Request) -> int:
    keys = extend_keys(seed_of(request.namespace), request.tokens, bench.config.page_size)
    return bench.cache.match(request.namespace, request.tokens, keys).num_tokens


def test_what_a_request_computed_is_found_though_it_ended_under_a_step() -> None:
    """The next turn of a conversation may come sooner than the commit of a step that was planned for the last one."""
    bench = Bench(config(num_ahead=1))
    request = make_request(range(6), max_tokens=50)
    bench.add(request)
    bench.step()
    under_way: list[StepPlan] = []
    for _ in range(7):
        draw_behind(bench, under_way)
    assert (request.num_computed, cached_len(bench, request)) == (12, 4)
    bench.scheduler.finish(request)
    assert bench.scheduler.steps.is_in_flight(request)
    assert cached_len(bench, request) == 12
    bench.commit(under_way.pop())
    bench.check_empty()


def test_no_page_is_freed_under_a_step_that_reads_it() -> None:
    """Another one was first to hand over the same pages: those that a step reads are freed when it is committed."""
    bench = Bench(config(num_ahead=1))
    first, second = make_request(range(6), max_tokens=50), make_request(range(6), max_tokens=50)
    bench.add(first, second)
    bench.step()
    bench.step()
    under_way: list[StepPlan] = []
    for _ in range(7):
        draw_behind(bench, under_way)
    assert (first.num_computed, second.num_computed) == (13, 12)
    bench.scheduler.finish(first)
    num_free = bench.pools[0].num_free
    bench.scheduler.finish(second)
    assert bench.pools[0].num_free == num_free
    bench.commit(under_way.pop())
    assert bench.pools[0].num_free > num_free
    bench.check_empty()


@pytest.mark.parametrize("num_ahead", [1, 2])
@pytest.mark.parametrize("is_alone", [True, False])
def test_who_ended_under_steps_is_in_no_further_one(num_ahead: int, is_alone: bool) -> None:
    """There is always a step under way: it gives its row and pages back all the same."""
    bench = Bench(config(num_ahead=num_ahead))
    ended, other = make_request(range(6), max_tokens=50), make_request(range(7, 12), max_tokens=50)
    bench.add(ended, *([] if is_alone else [other]))
    bench.step()
    bench.step()
    steps, row = bench.scheduler.steps, ended.row
    under_way = [plan for _ in range(num_ahead + 1) if (plan := steps.plan()) is not None]
    assert all(row in [item.row for item in plan.items] for plan in under_way)
    bench.scheduler.finish(ended)
    for num_left in reversed(range(num_ahead + 1)):
        assert steps.is_in_flight(ended)
        commit_drawn(bench, under_way.pop(0))
        if steps.has_work() and (plan := steps.plan()) is not None:
            assert row not in [item.row for item in plan.items]
            under_way.append(plan)
        assert steps.is_in_flight(ended) == (num_left > 0)
    assert (ended.row, ended.lease, ended.owned) == (None, None, ())
    while under_way:
        commit_drawn(bench, under_way.pop(0))


def test_plan_and_commit_alternate() -> None:
    bench = Bench(config())
    bench.add(make_request(range(6), max_tokens=5))
    bench.scheduler.waiting.admit(0.0)
    assert bench.scheduler.steps.has_work()
    plan = bench.plan()
    assert not bench.scheduler.steps.has_work()
    with pytest.raises(StateError):
        bench.scheduler.steps.plan()
    with pytest.raises(StateError):
        bench.scheduler.steps.commit(StepResult(plan.step + 1, ()))  # type: ignore[arg-type]
    bench.commit(plan)
    with pytest.raises(StateError):
        bench.scheduler.steps.commit(StepResult(plan.step, ()))


def test_an_idle_scheduler_plans_nothing() -> None:
    bench = Bench(config())
    assert bench.scheduler.steps.plan() is None
    assert not bench.scheduler.steps.has_work()


def test_leaving_keeps_the_pages_and_frees_the_row() -> None:
    bench = Bench(config())
    request = make_request(range(6), max_tokens=1)
    bench.add(request)
    bench.step()
    bench.scheduler.running.leave(request)
    assert (request.row, request.num_pages, len(bench.scheduler.running)) == (None, 2, 0)
    bench.scheduler.finish(request)
    bench.check_empty()


def test_finish_keeps_whole_pages_of_prompt_and_output() -> None:
    bench = Bench(config())
    request = make_request(range(6), max_tokens=9)
    bench.add(request)
    for token in (40, 41, 42, 43):
        bench.step(token)
    bench.scheduler.finish(request)  # 6 + 4 tokens, 9 computed
    assert bench.pools[0].count(PageState.CACHED) == 2
    bench.check_empty()
    again = make_request([*range(6), 40, 41, 42, 43], max_tokens=1)
    bench.add(again)
    assert bench.step()[0].items[0].q_start == 8


def test_rows_that_extend_are_not_listed_as_sharing() -> None:
    """With pages of one token a chunk may be one token long and yet not the last."""
    bench = Bench(config(page_size=1, chunk_len=4, step_len=5, split_tokens=2))
    seed = make_request(range(8), max_tokens=1, page_size=1)
    bench.add(seed)
    bench.step()
    bench.step()
    bench.scheduler.finish(seed)
    requests = [
        make_request([*range(8), 50 + i, *range(20, 20 + n)], max_tokens=6, page_size=1) for i, n in ((0, 3), (1, 9))
    ]
    bench.add(*requests)
    for _ in range(8):
        plan, _ = bench.step()
        decoding = {item.row for item in plan.items if item.samples and item.q_len == 1}
        for run in plan.work.shared:
            assert set(run.rows) <= decoding
    assert plan.work.shared


def test_two_pools_share_runs_that_are_true_in_both() -> None:
    bench = Bench(config(max_running=8, split_tokens=4), (64, 80), (KEEP_ALL, LONG_WINDOW))
    bench.pools[1].allocate(3)
    requests = [make_request([*range(12), *([60 + i // 2] * 4), 90 + i], max_tokens=9) for i in range(4)]
    bench.add(*requests)
    for _ in range(12):
        plan, _ = bench.step()
    tables = {r.row: page_lists(bench, r) for r in requests if r.row is not None}
    q_starts = {item.row: item.q_start for item in plan.items}
    check_runs(plan.work.shared, tables, q_starts, 4, 4)
    assert sorted((run.start, run.end, len(run.rows)) for run in plan.work.shared) == [
        (0, 12, 4),
        (12, 16, 2),
        (12, 16, 2),
    ]


def test_who_holds_its_pages_passes_those_who_wait_for_them() -> None:
    """Retracted requests that fit no more stand first; what they wait for is held by landed ones behind them."""
    bench = Bench(config(max_running=4), num_pages=(8,))
    landed = make_request(range(20), max_tokens=1, cache=CacheUse.BYPASS)
    large = make_request(range(50, 80), max_tokens=1)
    bench.add(landed)
    bench.scheduler.waiting.admit(0.0)
    bench.scheduler.running.leave(landed)
    large.is_urgent = True
    bench.add(large)
    assert bench.scheduler.waiting.admit(0.0) == []
    bench.scheduler.waiting.add_landed(landed)
    assert bench.scheduler.waiting.admit(5.0) == [landed]
    bench.scheduler.finish(landed)
    assert bench.scheduler.waiting.admit(6.0) == [large]


def test_a_row_promised_to_somebody_whose_pages_are_on_their_way_is_nobody_elses() -> None:
    bench = Bench(config(max_running=2))
    entering = make_request(range(8), max_tokens=3)
    entering.origin = Origin.FETCHED

    class Fetching(NoOwner):
        def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
            bench.scheduler.waiting.enter(request)
            return TryOutcome.TAKEN

    first, second = make_request(range(20, 25), max_tokens=3), make_request(range(30, 35), max_tokens=3)
    bench.add(entering, first, second)
    assert bench.scheduler.waiting.admit(0.0, Fetching()) == [first]
    bench.scheduler.discard(entering)
    assert bench.scheduler.waiting.admit(0.0, Fetching()) == [second]


# ---------------------------------------------------------------- what shortage has cost


def test_refusals_of_memory_and_retractions_are_counted() -> None:
    bench = Bench(config(), num_pages=(6,))
    old = make_request(range(14), max_tokens=8, arrival=1.0)
    young = make_request(range(50, 62), max_tokens=2, arrival=2.0)
    bench.add(old, young)
    assert bench.scheduler.waiting.admit(0.0) == [old]
    assert (bench.scheduler.waiting.num_blocked, bench.scheduler.waiting.blocked_need) == (1, 3)
    bench.scheduler.finish(old)
    assert bench.scheduler.waiting.admit(0.0) == [young]
    assert (bench.scheduler.waiting.num_blocked, bench.scheduler.waiting.blocked_need) == (1, 0)
    bench.scheduler.running.retract(young)
    assert bench.scheduler.running.num_retractions == 1


def test_an_idle_scheduler_is_taken_over_with_the_rows_its_executor_is_still_to_close() -> None:
    bench = Bench(config())
    request = make_request(range(8), max_tokens=1)
    bench.add(request)
    with pytest.raises(StateError):
        bench.scheduler.become(config(reserve_len=0))
    plan, _ = bench.step()
    assert not bench.scheduler.is_idle
    bench.scheduler.finish(request)
    assert bench.scheduler.is_idle
    bench.scheduler.become(config(reserve_len=0))
    bench.add(make_request(range(100, 108), max_tokens=1))
    assert bench.step()[0].closes == (plan.items[0].row,)


PAGES_ALONE = ((120,), (KEEP_ALL,))
WITH_STATES = ((120, 24), (KEEP_ALL, Retention(Lifetime.STATE)))
Pools = tuple[tuple[int, ...], tuple[Retention, ...]]


def retractions_and_steps(reserve_len: int, pools: Pools) -> tuple[int, int]:
    """24 answers of 120 tokens, of which 3 fit at their full length, on 16 rows; each resumes from what it left."""
    bench = Bench(config(reserve_len=reserve_len, max_running=16), *pools)
    waiting = [make_request(range(1000 * i, 1000 * i + 24), max_tokens=120, arrival=float(i)) for i in range(24)]
    bench.add(*waiting)
    num_steps = 0
    while waiting:
        bench.step()
        num_steps += 1
        bench.add(*bench.scheduler.running.take_retracted())
        ended = [request for request in waiting if request.num_tokens == request.max_len]
        for request in ended:
            bench.scheduler.finish(request)
            waiting.remove(request)
    bench.check_empty()
    return bench.scheduler.running.num_retractions, num_steps


def test_a_reserve_that_adapts_retracts_a_third_as_often_as_none_in_no_more_time() -> None:
    """20 against 122; with the same reserve, not doubled by retractions, it would be 35."""
    retractions, steps = retractions_and_steps(8, PAGES_ALONE)
    bare_retractions, bare_steps = retractions_and_steps(0, PAGES_ALONE)
    assert retractions <= bare_retractions / 3
    assert steps <= bare_steps * 1.05


def test_with_states_it_does_so_too() -> None:
    """20 against 123: one that is retracted goes on from the last state that it passed."""
    retractions, _ = retractions_and_steps(8, WITH_STATES)
    bare_retractions, _ = retractions_and_steps(0, WITH_STATES)
    assert retractions <= bare_retractions / 3
