"""A pool with a window beside one that keeps everything: its pages go on behind the request."""

from deltaserve.control.cache.pages import PageState
from deltaserve.control.sched.request import Origin, Request
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.control.sched.toys import Bench, config, held_pages, make_request

FULL, WINDOW = PoolId(0), PoolId(1)
NINE = Retention(Lifetime.WINDOW, 9)
"""Behind a page boundary the last two pages of four tokens are seen."""
MOST = NINE.most_pages(1000, 8, 4)


def bench_of(num_pages: int = 40, num_window: int = MOST, **changes: int) -> Bench:
    return Bench(config(**changes), (num_pages, num_window), (KEEP_ALL, NINE))


def held(request: Request) -> list[range]:
    return [range(min(held_pages(request, pool)), request.end_page(pool)) for pool in (FULL, WINDOW)]


def finish(bench: Bench, request: Request) -> None:
    while request.output_len < request.sampling.max_tokens:
        bench.step()
    bench.scheduler.finish(request)
    bench.cache.check_integrity()


def test_a_prompt_longer_than_the_window_pool_is_computed() -> None:
    bench = bench_of()
    request = make_request(range(100), max_tokens=20)
    bench.add(request)
    bench.step()
    assert held(request) == [range(25), range(MOST)]
    while request.output_len < 20:
        bench.step()
        assert [pages.start for pages in held(request)] == [0, max(0, request.num_computed // 4 * 4 - 8) // 4]
        assert len(held(request)[WINDOW]) <= MOST
    bench.scheduler.discard(request)
    bench.check_empty()


def test_a_prompt_goes_on_from_a_cached_window() -> None:
    bench = bench_of(num_window=12)
    first, second = make_request(range(40), max_tokens=1), make_request([*range(40), 50, 51], max_tokens=2)
    bench.add(first)
    finish(bench, first)
    bench.add(second)
    (request,) = bench.scheduler.waiting.admit(0.0)
    assert (request.num_computed, request.lease and request.lease.first_page(WINDOW)) == (40, 8)
    finish(bench, second)


def test_without_its_window_a_prefix_is_computed_again_and_the_gap_is_filled() -> None:
    bench = bench_of(num_window=12)
    for _ in range(2):
        request = make_request(range(40), max_tokens=1)
        bench.add(request)
        assert bench.scheduler.waiting.admit(0.0) == [request]
        assert request.num_computed == 0
        finish(bench, request)
        match = bench.cache.match(request.namespace, request.tokens, request.keys)
        assert (match.num_tokens, match.reach) == (40, 40)
        bench.cache.evict((0, 12))
        match = bench.cache.match(request.namespace, request.tokens, request.keys)
        assert (match.num_tokens, match.reach) == (0, 40)
    bench.check_empty()


def test_all_pools_have_room_or_none_is_taken() -> None:
    bench = bench_of(num_pages=40, num_window=2 * MOST)
    requests = [make_request(range(i, i + 40), max_tokens=4, arrival=i) for i in (0, 100, 200)]
    bench.add(*requests)
    free = [pool.num_free for pool in bench.pools]
    admitted = [bench.scheduler.waiting.admit(0.0)]
    assert admitted == [requests[:1]], "two steps' worth of tokens at a time"
    assert [before - pool.num_free for before, pool in zip(free, bench.pools, strict=True)] == [10, MOST]
    while any(r.output_len < 4 for r in requests):
        bench.step()
        for request in requests:
            if request.output_len == 4 and request in bench.scheduler.running:
                bench.scheduler.finish(request)
    assert all(r.num_retractions == 0 for r in requests), "what a window still needs is kept for it"
    bench.check_empty()


def test_of_two_prompts_that_are_fetched_one_waits_where_both_could_not_go_on() -> None:
    """Seed 17958784841265 of the simulator: what is sent of a window is what the next token sees, without a page for
    that token. Two of them filled the pool, and each threw out the other for one token at a time."""
    two = Retention(Lifetime.WINDOW, 2)
    bench = Bench(config(page_size=1, chunk_len=1), (40, 2), (KEEP_ALL, two))
    running = bench.scheduler.running
    fetched, computed = make_request(range(9), max_tokens=4), make_request(range(9), max_tokens=4)
    fetched.origin = Origin.FETCHED
    assert running.needs.most(9)[WINDOW] == 2
    assert running.reserve_of(fetched)[WINDOW] == 1
    assert running.reserve_of(computed)[WINDOW] == 0
    fetched.own(([*map(PageId, range(9))], [PageId(0)]), (0, 8))
    assert running.reserve_of(fetched)[WINDOW] == 1


def test_the_last_token_of_a_lone_prompt_waits_for_pages_that_are_still_read() -> None:
    """They were given up while a transfer or a copy reads them. Thrown out for want of them the prompt would be
    computed again, as far as to the same token."""
    bench = bench_of(num_window=MOST)
    other = make_request(range(60, 64), max_tokens=1)
    bench.add(other)
    finish(bench, other)
    request = make_request(range(33), max_tokens=2)
    bench.add(request)
    while request.num_computed < 32:
        bench.step()
    pool, read = bench.pools[WINDOW], bench.pools[WINDOW].num_pages - bench.pools[WINDOW].num_free
    pinned = [PageId(page) for page in range(pool.num_pages) if pool.state(PageId(page)) is not PageState.FREE]
    assert len(pinned) == read
    pool.pin(pinned)
    bench.cache.evict((0, 1))
    assert bench.scheduler.steps.plan() is None
    assert (request.num_computed, request.num_retractions) == (32, 0)
    pool.unpin(pinned)
    finish(bench, request)
    assert request.num_retractions == 0
    bench.check_empty()
