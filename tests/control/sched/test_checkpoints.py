"""Which recurrent states are kept: on an absolute grid, where somebody goes on, and few of each path."""

from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.core.ids import PoolId
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.control.sched.toys import Bench, config, make_request

STATE = PoolId(1)
SHARED = range(100, 121)
"""The last page boundary in it is 20, the last point of a grid of 8 is 16."""


def bench_of(num_states: int = 20, **changes: int) -> Bench:
    changes = {"state_chunk_len": 8, "chunk_len": 32, "step_len": 64} | changes
    return Bench(config(**changes), (200, num_states), (KEEP_ALL, Retention(Lifetime.STATE)))


def serve(bench: Bench, *requests: Request) -> None:
    """From the queue to the end, all at once."""
    bench.add(*requests)
    waiting = list(requests)
    while waiting:
        bench.step()
        for request in [r for r in waiting if r.output_len >= r.sampling.max_tokens]:
            waiting.remove(request)
            bench.scheduler.finish(request)
    bench.check_empty()


def kept(bench: Bench, request: Request) -> list[int]:
    """Lengths of the path of a request after which a state is in the tree."""
    found = []
    for length in range(1, request.num_tokens + 1):
        match = bench.cache.match(request.namespace, request.tokens, request.keys, length)
        if match.num_tokens == length:
            found.append(length)
    return found


def test_the_grid_is_of_whole_pages_and_whole_pieces() -> None:
    lengths = {(64, 16): 64, (64, 128): 128, (64, 1): 64, (6, 4): 12}
    for (piece, page), grid in lengths.items():
        made = SchedConfig(page_size=page, max_running=1, state_chunk_len=piece)
        assert made.grid_len == grid


def test_a_prompt_keeps_its_last_point_before_its_last_token() -> None:
    for prompt_len, point in ((9, 8), (16, 8), (17, 16), (100, 96)):
        bench, request = bench_of(), make_request(range(prompt_len), max_tokens=1)
        serve(bench, request)
        assert kept(bench, request) == ([point] if prompt_len % 8 else [point, prompt_len])


def test_equal_prompts_are_computed_once_but_for_their_tails() -> None:
    bench = bench_of()
    requests = [make_request(range(50), max_tokens=1, arrival=i) for i in range(6)]
    serve(bench, *requests)
    assert [bench.started[r] for r in requests] == [0, 48, 48, 48, 48, 48]


def test_of_an_answer_the_last_point_is_kept() -> None:
    bench, request = bench_of(), make_request(range(10), max_tokens=60)
    serve(bench, request)
    assert kept(bench, request) == [8, 64]


def test_an_interval_keeps_more() -> None:
    bench, request = bench_of(state_interval_len=20), make_request(range(60), max_tokens=40)
    serve(bench, request)
    assert kept(bench, request) == [24, 48, 56, 72, 96]


def test_where_prompts_part_is_found_by_the_second_and_used_by_the_third() -> None:
    bench = bench_of()
    requests = [make_request([*SHARED, *[i] * 20], max_tokens=1, arrival=i) for i in range(4)]
    for request in requests:
        serve(bench, request)
    assert [bench.started[r] for r in requests] == [0, 0, 16, 16]
    assert kept(bench, requests[3]) == [16, 40]


def test_who_computes_is_cut_where_those_that_wait_part_from_it() -> None:
    bench = bench_of()
    requests = [make_request([*SHARED, *[i] * 20], max_tokens=1, arrival=i) for i in range(4)]
    serve(bench, *requests)
    assert [bench.started[r] for r in requests] == [0, 16, 16, 16]


def test_nobody_waits_for_a_duplicate_that_has_come_past_the_fork() -> None:
    bench = bench_of(chunk_len=24, step_len=96)
    first, second = (make_request([*SHARED, *[i] * 60], max_tokens=1, arrival=i) for i in (1, 2))
    bench.add(first)
    bench.step()
    assert first.num_computed == 24
    bench.add(second)
    bench.step()
    assert bench.started[second] == 0
    assert second.forks == {16}


def test_a_fork_is_not_asked_of_a_step_under_way() -> None:
    bench = bench_of(chunk_len=24, step_len=96)
    first, second = (make_request([*SHARED, *[i] * 60], max_tokens=1, arrival=i) for i in (1, 2))
    bench.add(first)
    bench.scheduler.waiting.admit(0.0)
    plan = bench.plan()
    bench.add(second)
    assert bench.scheduler.waiting.admit(0.0) == [second]
    bench.commit(plan)
    assert kept(bench, first) == []


def test_without_another_slot_a_request_goes_on_in_its_own() -> None:
    bench, request = bench_of(num_states=1), make_request(range(50), max_tokens=30)
    serve(bench, request)
    assert request.num_retractions == 0
    assert kept(bench, request) == []


def test_each_request_leaves_two_states_and_copies_none() -> None:
    """However long: of what it passes it takes two slots besides its own, and gives one of them back."""
    bench, request = bench_of(), make_request(range(100), max_tokens=400)
    serve(bench, request)
    assert kept(bench, request) == [96, 496]
    assert bench.most_states <= 3


def test_a_state_that_others_go_on_from_outlives_the_answer_that_left_it() -> None:
    bench, request = bench_of(), make_request(range(10), max_tokens=40)
    bench.add(request)
    while request.num_computed < 25:
        bench.step()
    turn = make_request([*range(10), *[7] * 14, 50, 51], max_tokens=1, arrival=1)
    bench.add(turn)
    while request.output_len < 40:
        bench.step()
    for ended in (request, turn):
        bench.scheduler.finish(ended)
    assert bench.started[turn] == 24
    assert kept(bench, request) == [8, 24, 48]


def test_without_a_cache_nothing_is_cut() -> None:
    bench = Bench(
        config(state_chunk_len=8, chunk_len=32, step_len=64, radix_cache=False),
        (200, 20),
        (KEEP_ALL, Retention(Lifetime.STATE)),
    )
    bench.add(make_request(range(30), max_tokens=1))
    plan, _ = bench.step()
    assert [(item.q_start, item.q_len) for item in plan.items] == [(0, 30)]
