"""A pool of recurrent states beside one that keeps everything: one slot moves on with a request, chunks leave more."""

import pytest

from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PoolId
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.wire.messages import CacheUse
from tests.control.sched.toys import Bench, config, held_pages, make_request, taken_pages

STATE = PoolId(1)


def bench_of(num_states: int, num_pages: int = 40) -> Bench:
    return Bench(config(), (num_pages, num_states), (KEEP_ALL, Retention(Lifetime.STATE)))


def finish(bench: Bench, request: Request) -> list[tuple[int, int]]:
    """(start, end) of each item."""
    computed = []
    while request.output_len < request.sampling.max_tokens:
        plan, _ = bench.step()
        computed += [(item.q_start, item.q_start + item.q_len) for item in plan.items if item.row == request.row]
        assert len(held_pages(request, STATE)) <= 2
    bench.scheduler.finish(request)
    return computed


def hit(bench: Bench, request: Request) -> int:
    return bench.cache.match(request.namespace, request.tokens, request.keys).num_tokens


def test_two_slots_serve_a_prompt_of_any_length() -> None:
    bench = bench_of(2)
    request = make_request(range(100), max_tokens=20)
    bench.add(request)
    finish(bench, request)
    assert request.num_retractions == 0
    bench.check_empty()


def test_a_chunk_ends_at_the_last_page_that_a_match_may_reach() -> None:
    bench = bench_of(20)
    request = make_request(range(21), max_tokens=1)
    bench.add(request)
    assert finish(bench, request)[-1] == (20, 21)
    assert hit(bench, request) == 20
    request = make_request(range(100, 120), max_tokens=1)
    bench.add(request)
    assert finish(bench, request)[-1] == (16, 20)
    again = make_request(range(100, 120), max_tokens=3)
    bench.add(again)
    assert finish(bench, again) == [(16, 20), (20, 21), (21, 22)]


@pytest.mark.parametrize(("prompt_len", "output_len", "end"), [(8, 13, 20), (20, 30, 48), (21, 7, 24)])
def test_the_next_turn_goes_on_from_the_end_of_the_answer(prompt_len: int, output_len: int, end: int) -> None:
    """From the last page boundary of what has KV; the answer's last token has none."""
    bench = bench_of(20)
    request = make_request(range(prompt_len), max_tokens=output_len)
    bench.add(request)
    finish(bench, request)
    turn = make_request([*range(prompt_len), *[7] * output_len, 50, 51, 52], max_tokens=1)
    assert hit(bench, turn) == end
    bench.add(turn)
    assert finish(bench, turn)[0][0] == end


def test_nobody_goes_on_where_the_state_is_gone() -> None:
    bench = bench_of(20)
    for _ in range(2):
        request = make_request(range(21), max_tokens=1)
        bench.add(request)
        assert finish(bench, request)[0][0] == 0
        assert hit(bench, request) == 20
        bench.cache.evict((0, 20))
        assert hit(bench, request) == 0


def test_states_of_a_prompt_that_is_not_cached_are_written_over() -> None:
    bench = bench_of(1)
    request = make_request(range(4), max_tokens=9, cache=CacheUse.BYPASS)
    bench.add(request)
    assert finish(bench, request)[0] == (0, 4)
    bench.check_empty()


def test_a_state_that_has_landed_is_gone_on_from_in_place() -> None:
    """It was never told to the executor under the index it came for."""
    bench = bench_of(2)
    request = make_request(range(4), max_tokens=9, cache=CacheUse.BYPASS)
    request.own(taken_pages(bench.budget.allocate((1, 1)) or ()), (0, 0))
    request.num_computed = 4
    bench.tables.states[STATE, request.owned[STATE][0]] = bytes(request.tokens)
    request.append(7)
    bench.scheduler.waiting.add_landed(request)
    finish(bench, request)
    bench.check_empty()


def test_rows_that_find_no_slot_for_their_next_state_make_way() -> None:
    bench = bench_of(3)
    requests = [make_request(range(i, i + 30), max_tokens=10, arrival=i) for i in (0, 100)]
    bench.add(*requests)
    for request in requests:
        while request.output_len < 10:
            bench.step()
            for again in bench.scheduler.running.take_retracted():
                bench.scheduler.waiting.add(again)
        bench.scheduler.finish(request)
    bench.check_empty()
