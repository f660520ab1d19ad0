"""How much of shared prompts is reused where a recurrent state has to be there, through the scheduler of production.

Nobody can know where the first two prompts of a group part before the second one comes: one at a time, that one
computes all and keeps the state there. Where the second one waits beside the first, the first is cut there.
"""

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from deltaserve.control.sched.request import Request
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.control.sched.toys import Bench, config, make_request

NUM_GROUPS, NUM_EACH, PAGE, GRID = 8, 16, 16, 64
SHARED_LEN, PRIVATE_LEN = 1990, 300
NUM_STATES = 64
"""Half as many as there are requests; 24 of which run at a time."""
Nuisance = Callable[[Bench, int], None]
"""What befalls the cache after a step of this number."""


def bench_of(num_states: int = NUM_STATES, num_pages: int = 6000) -> Bench:
    sizes = config(
        page_size=PAGE, state_chunk_len=GRID, max_running=24, chunk_len=1024, step_len=4096, split_tokens=2 * PAGE
    )
    return Bench(sizes, (num_pages, num_states), (KEEP_ALL, Retention(Lifetime.STATE)))


def groups(
    private_len: int, num_each: int = NUM_EACH, shared_len: int = SHARED_LEN, page_size: int = PAGE
) -> list[list[Request]]:
    """Per group its requests; they come in turns, one of each group."""
    made: list[list[Request]] = [[] for _ in range(NUM_GROUPS)]
    for number in range(num_each):
        for group, requests in enumerate(made):
            shared = [group * 10_000 + i for i in range(shared_len)]
            private = [1_000_000 + (group * num_each + number) * 10_000 + i for i in range(private_len)]
            requests.append(make_request([*shared, *private], 1 + number % 3, arrival=number, page_size=page_size))
    return made


def quiet(bench: Bench, step: int) -> None:
    """Nothing."""


def serve(bench: Bench, made: Sequence[Sequence[Request]], concurrency: int, nuisance: Nuisance = quiet) -> None:
    """Each to its end, so many at a time. The tables refuse a step that reads anything but its own row's state."""
    waiting = deque(request for turn in zip(*made, strict=True) for request in turn)
    under_way: list[Request] = []
    step = 0
    while waiting or under_way:
        while waiting and len(under_way) < concurrency:
            under_way.append(waiting[0])
            bench.add(waiting.popleft())
        bench.step()
        for retracted in bench.scheduler.running.take_retracted():
            bench.add(retracted)
        for request in [r for r in under_way if r.output_len >= r.sampling.max_tokens]:
            under_way.remove(request)
            bench.scheduler.finish(request)
        step += 1
        nuisance(bench, step)
    bench.check_empty()


def reused(bench: Bench, made: Sequence[Sequence[Request]], shared_len: int = SHARED_LEN) -> float:
    """Share of the shared tokens that is reused, from each group's second request on."""
    taken = [min(shared_len, bench.started[request]) for requests in made for request in requests[1:]]
    return sum(taken) / (shared_len * len(taken))


@pytest.mark.parametrize("concurrency", [1, 5, NUM_GROUPS * NUM_EACH])
def test_shared_tokens_are_reused(concurrency: int) -> None:
    bench, made = bench_of(), groups(PRIVATE_LEN)
    serve(bench, made, concurrency)
    assert reused(bench, made) >= 0.9
    at_most = 2 if concurrency < NUM_GROUPS else 1
    in_full = [sum(bench.started[r] < GRID * (SHARED_LEN // GRID) for r in requests) for requests in made]
    assert max(in_full) <= at_most, "requests of a group that computed what is shared"


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 5, 1024])
@pytest.mark.parametrize("private_len", [2744, 0])
def test_the_public_load(concurrency: int, private_len: int) -> None:
    """8 groups x 128 of 1,000 shared tokens and 2,744 own ones, and as many equal prompts, as SGLang's #11214 sends."""
    sizes = config(page_size=64, state_chunk_len=64, max_running=64, chunk_len=16_384, step_len=16_384)
    bench = Bench(sizes, (12_000, 256), (KEEP_ALL, Retention(Lifetime.STATE)))
    made = groups(private_len, num_each=128, shared_len=1000, page_size=64)
    serve(bench, made, concurrency)
    assert reused(bench, made, shared_len=1000) >= 0.9


@pytest.mark.parametrize("concurrency", [1, 5, NUM_GROUPS * NUM_EACH])
def test_equal_prompts_are_reused(concurrency: int) -> None:
    bench, made = bench_of(), groups(private_len=0)
    serve(bench, made, concurrency)
    assert reused(bench, made) >= 0.9
    assert all(bench.started[r] >= SHARED_LEN - GRID for requests in made for r in requests[1:])


def without_states(bench: Bench, step: int) -> None:
    bench.cache.evict((0, NUM_STATES))


def without_pages(bench: Bench, step: int) -> None:
    bench.cache.evict((40, 0))


def without_either(bench: Bench, step: int) -> None:
    bench.cache.evict((40, 2))


def now_and_then(bench: Bench, step: int) -> None:
    if step % 7 == 0:
        bench.cache.clear()


@pytest.mark.parametrize("nuisance", [without_states, without_pages, without_either, now_and_then])
def test_nothing_is_lost_but_time_when_pages_or_states_are_evicted(nuisance: Nuisance) -> None:
    bench, made = bench_of(), groups(PRIVATE_LEN)
    serve(bench, made, NUM_GROUPS * NUM_EACH, nuisance)
    assert all(r.output_len == r.sampling.max_tokens for requests in made for r in requests)
    assert all(r.num_retractions == 0 for requests in made for r in requests)


@pytest.mark.parametrize(("num_pages", "num_states"), [(6000, 3), (160, 200), (160, 3)])
def test_one_full_pool_beside_an_empty_one(num_pages: int, num_states: int) -> None:
    """A hundred requests, of which one or a few fit."""
    bench, made = bench_of(num_states, num_pages), groups(PRIVATE_LEN)
    serve(bench, made, NUM_GROUPS * NUM_EACH)
    assert all(r.output_len == r.sampling.max_tokens for requests in made for r in requests)
    assert all(r.num_retractions == 0 for requests in made for r in requests)
