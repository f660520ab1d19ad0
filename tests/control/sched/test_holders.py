"""Who gives up what it holds while it waits, and for whom."""

from deltaserve.control.sched.holders import Holders
from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PoolId
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from tests.control.sched.toys import Bench, config, make_request, taken_pages

ANY = (PoolId(0),)
STATES = (PoolId(1),)


def holders_of(*requests: Request) -> Holders:
    holders = Holders(lambda request: True, lambda request: None)
    for request in requests:
        holders.add(request)
    return holders


def test_the_youngest_yields_to_those_before_it() -> None:
    old, middle, young = (make_request(range(8), max_tokens=1, arrival=at) for at in (1.0, 2.0, 3.0))
    holders = holders_of(old, young, middle)
    assert holders.youngest(ANY) is young
    assert holders.youngest_behind(old, ANY) is young
    assert holders.youngest_behind(middle, ANY) is young
    assert holders.youngest_behind(young, ANY) is None
    assert holders.youngest_but(young, ANY) is middle


def test_of_two_that_came_at_once_either_yields_to_the_other() -> None:
    """Two samples of one request: if neither did, both would wait for each other's pages for ever."""
    one, other = (make_request(range(8), max_tokens=1, arrival=1.0) for _ in range(2))
    holders = holders_of(one, other)
    assert holders.youngest_behind(one, ANY) is other
    assert holders.youngest_behind(other, ANY) is one
    assert holders_of(one).youngest_behind(one, ANY) is None


def test_one_that_has_come_back_to_its_place_does_not_yield_to_itself() -> None:
    queued: set[Request] = set()
    request = make_request(range(8), max_tokens=1, arrival=1.0)
    holders = Holders(queued.__contains__, lambda request: None)
    holders.add(request)
    queued.add(request)
    holders.add(request)
    queued.clear()
    holders.add(request)
    assert holders.youngest_behind(request, ANY) is None
    assert holders.youngest(ANY) is request


def test_only_those_are_asked_that_hold_what_is_short() -> None:
    bench = Bench(config(), (40, 8), (KEEP_ALL, Retention(Lifetime.STATE)))
    first, holding, last = (make_request(range(8), max_tokens=1, arrival=at) for at in (1.0, 2.0, 3.0))
    for request in (holding, last):
        request.own(taken_pages(bench.budget.allocate((2, int(request is holding))) or ()), (0, 0))
    holders = holders_of(holding, last)
    assert holders.youngest(ANY) is last
    assert holders.youngest(STATES) is holding
    assert holders.youngest_behind(first, STATES) is holding
    assert holders.youngest_but(holding, STATES) is None
    bench.budget.free(holding.disown())
    assert holders.youngest(STATES) is None
