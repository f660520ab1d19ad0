"""How waiting requests are ranked."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.policy import MAX_PASSED, POLICIES
from deltaserve.control.sched.queue import FairQueue, TryOutcome
from deltaserve.control.sched.request import Request
from deltaserve.core.priority import MAX_PRIORITY
from tests.control.sched.toys import make_request


def test_longest_cached_prefix_first() -> None:
    pool = PagePool(8)
    cache = PrefixCache(2, (pool,))
    cached = make_request([1, 2, 3, 4, 5], max_tokens=1)
    seed = b"\x00" * 16
    cached.grow_keys(seed, 2, 2)
    pages = pool.allocate(2)
    assert pages is not None
    tokens = bytes(cached.tokens[:16])
    cache.insert(cache.empty_lease(cached.namespace), cached.namespace, tokens, bytes(cached.keys), (pages,))
    ranking = POLICIES["lpm"](cache)
    assert ranking is not None
    other = make_request([9, 9, 9, 9, 9, 9], max_tokens=1)
    assert (ranking.rank(cached), ranking.rank(other)) == (4, 0)
    assert POLICIES["fcfs"](cache) is None


def asked(priority: int) -> Request:
    return replace(make_request([1], max_tokens=1), priority=priority)


def queue_of(policy: str) -> FairQueue:
    return FairQueue(POLICIES[policy](PrefixCache(2, (PagePool(8),))))


def take(queue: FairQueue, most: int, *waiting: Request) -> list[Request]:
    """What is taken while rows last, as many as `most`: none is refused, the others are held back. So are those
    `waiting` for something else."""
    left = most

    def attempt(request: Request) -> TryOutcome:
        nonlocal left
        if request in waiting or not left:
            return TryOutcome.HELD_BACK
        left -= 1
        return TryOutcome.TAKEN

    return queue.take(attempt, 0.0)


@pytest.mark.parametrize(
    ("policy", "order"), [("priority", [5, 2, 2, 0, -1]), ("priority-low-first", [-1, 0, 2, 2, 5]), ("fcfs", None)]
)
def test_priorities_go_first_and_equal_ones_by_arrival(policy: str, order: list[int] | None) -> None:
    queue, requests = queue_of(policy), [asked(priority) for priority in (0, 2, -1, 5, 2)]
    for request in requests:
        queue.push(request)
    taken = take(queue, len(requests))
    assert [request.priority for request in taken] == (order or [0, 2, -1, 5, 2])
    assert taken.index(requests[1]) < taken.index(requests[4])


def test_a_high_priority_behind_a_long_queue_is_taken_next() -> None:
    queue, urgent = queue_of("priority"), asked(1)
    for _ in range(500):
        queue.push(asked(0))
    queue.push(urgent)
    assert take(queue, 1) == [urgent]


def test_the_longest_waiting_is_taken_behind_so_many_that_passed_it() -> None:
    """However many of a higher priority come, each before a row is free."""
    queue, least, second = queue_of("priority"), asked(-MAX_PRIORITY), asked(-MAX_PRIORITY)
    queue.push(least)
    queue.push(second)
    taken: list[Request] = []
    while second in queue:
        queue.push(asked(MAX_PRIORITY))
        taken += take(queue, 1)
        assert len(taken) <= 2 * (MAX_PASSED + 1)
    assert (taken.index(least), taken.index(second)) == (MAX_PASSED, 2 * MAX_PASSED + 1)


def test_one_that_waits_for_something_else_keeps_nobody_from_its_turn() -> None:
    """The oldest is held back all the while: its turns are the next one's."""
    queue, held, least = queue_of("priority"), asked(0), asked(-1)
    queue.push(held)
    queue.push(least)
    taken: list[Request] = []
    while least in queue:
        queue.push(asked(1))
        taken += take(queue, 1, held)
        assert len(taken) <= MAX_PASSED + 1
    assert held in queue


@given(
    st.sampled_from(["priority", "priority-low-first"]),
    st.lists(
        st.tuples(st.lists(st.integers(-MAX_PRIORITY, MAX_PRIORITY), max_size=12), st.integers(0, 4)), max_size=60
    ),
)
def test_each_is_taken_within_a_bound_by_those_before_it(policy: str, turns: list[tuple[list[int], int]]) -> None:
    """Turn after turn some come and some are taken. Who came behind k others is taken among the next 9 (k + 1)."""
    queue = queue_of(policy)
    due: dict[Request, int] = {}
    num_taken = 0
    for arrivals, num_rows in [*turns, ([], 10**6)]:
        for priority in arrivals:
            request = asked(priority)
            due[request] = num_taken + (MAX_PASSED + 1) * (len(queue) + 1)
            queue.push(request)
        for request in take(queue, num_rows):
            num_taken += 1
            assert num_taken <= due[request]
    assert not queue
