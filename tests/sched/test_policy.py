"""Order of admission: arrival, with overtaking bounded in number and in time."""

from deltaserve.cache.allocator import PagePool
from deltaserve.cache.prefix_cache import PrefixCache
from deltaserve.request.request import Request
from deltaserve.sched.policy import MAX_OVERTAKES, MAX_WAIT_S, POLICIES, AdmissionQueue
from tests.sched.toys import make_request


def requests(count: int) -> list[Request]:
    return [make_request(range(i + 1), max_tokens=1, arrival=float(i)) for i in range(count)]


def test_requests_wait_in_order_of_arrival_retracted_ones_first() -> None:
    queue = AdmissionQueue()
    first, second, retracted = requests(3)
    queue.push(first)
    queue.push(second)
    queue.push_first(retracted)
    assert list(queue) == [retracted, first, second]
    assert (len(queue), queue.num_tokens) == (3, 6)


def test_everyone_before_an_admitted_one_was_overtaken() -> None:
    queue = AdmissionQueue()
    a, b, c = requests(3)
    for request in (a, b, c):
        queue.push(request)
    queue.remove(b)
    assert [r.overtaken for r in (a, b, c)] == [1, 0, 0]
    queue.remove(c)
    assert a.overtaken == 2
    assert list(queue) == [a]


def test_overtaking_ends_after_so_many() -> None:
    queue = AdmissionQueue()
    (blocked,) = requests(1)
    queue.push(blocked)
    for _ in range(MAX_OVERTAKES):
        assert queue.may_overtake(blocked, 0.0)
        other = make_request([1], max_tokens=1)
        queue.push(other)
        queue.remove(other)
    assert not queue.may_overtake(blocked, 0.0)


def test_overtaking_ends_after_so_long_from_the_first_refusal() -> None:
    queue = AdmissionQueue()
    (blocked,) = requests(1)
    queue.push(blocked)
    assert queue.may_overtake(blocked, 10.0)
    assert queue.may_overtake(blocked, 10.0 + MAX_WAIT_S * 0.99)
    assert not queue.may_overtake(blocked, 10.0 + MAX_WAIT_S)
    queue.discard(blocked)
    queue.push(blocked)
    assert queue.may_overtake(blocked, 20.0)  # a new wait


def test_discarding_what_is_not_queued_is_fine() -> None:
    queue = AdmissionQueue()
    (request,) = requests(1)
    queue.discard(request)
    assert len(queue) == 0


def test_ranked_requests_go_best_first_and_starved_ones_before_all() -> None:
    queue = AdmissionQueue(lambda request: request.num_tokens)
    short, middle, long = requests(3)
    for request in (short, middle, long):
        queue.push(request)
    assert queue.in_order() == [long, middle, short]
    short.overtaken = MAX_OVERTAKES
    assert queue.in_order() == [short, long, middle]


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
    rank = POLICIES["lpm"](cache)
    assert rank is not None
    other = make_request([9, 9, 9, 9, 9, 9], max_tokens=1)
    assert (rank(cached), rank(other)) == (4, 0)
    assert POLICIES["fcfs"](cache) is None
