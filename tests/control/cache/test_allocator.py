"""PagePool: all or nothing, pins, conservation."""

from collections.abc import Callable

import pytest

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PAGE_TRANSITIONS, PageEvent, PageState
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.ids import PageId
from tests.control.cache.toys import taken

BY_PAGE = {
    PageEvent.LAND: PagePool.land,
    PageEvent.REVOKE: PagePool.revoke,
    PageEvent.DRAIN: PagePool.drain,
    PageEvent.FREE: PagePool.free,
    PageEvent.CACHE: PagePool.cache,
    PageEvent.EVICT: PagePool.evict,
}
"""Events that name their pages; ALLOCATE and GRANT take whatever is FREE."""


def page_in(pool: PagePool, state: PageState) -> PageId:
    """Bring a page into a state along legal events."""
    if state is PageState.FREE:
        (page,) = taken(pool.allocate(1))
        pool.free((page,))
        return page
    granted = state in (PageState.GRANTED, PageState.QUARANTINED)
    (page,) = taken(pool.grant(1) if granted else pool.allocate(1))
    if state is PageState.QUARANTINED:
        pool.revoke((page,))
    if state is PageState.CACHED:
        pool.cache((page,))
    return page


def picture(pool: PagePool) -> tuple[object, ...]:
    """Everything a caller can see."""
    pages = [PageId(page) for page in range(pool.num_pages)]
    return (
        [pool.state(page) for page in pages],
        pool.generations(),
        [pool.count(state) for state in PageState],
        (pool.num_free, pool.num_held, pool.num_pinned),
    )


@pytest.mark.parametrize("state", PageState)
@pytest.mark.parametrize("event", BY_PAGE)
def test_every_cell(state: PageState, event: PageEvent) -> None:
    pool = PagePool(4)
    page = page_in(pool, state)
    target = PAGE_TRANSITIONS[state].get(event)
    before = picture(pool)
    if target is None:
        with pytest.raises(StateError):
            BY_PAGE[event](pool, (page,))
        assert picture(pool) == before
    else:
        BY_PAGE[event](pool, (page,))
        assert pool.state(page) is target
    pool.check_integrity()


@pytest.mark.parametrize(
    ("take", "target"), [(PagePool.allocate, PageState.OWNED), (PagePool.grant, PageState.GRANTED)]
)
def test_taking_touches_free_pages_only(
    take: Callable[[PagePool, int], tuple[PageId, ...] | None], target: PageState
) -> None:
    pool = PagePool(8)
    others = {page_in(pool, state): state for state in PageState if state is not PageState.FREE}
    pages = taken(take(pool, pool.num_free))
    assert not set(pages) & others.keys()
    assert all(pool.state(page) is target for page in pages)
    assert all(pool.state(page) is state for page, state in others.items())
    assert take(pool, 1) is None
    pool.check_integrity()


@pytest.mark.parametrize("event", BY_PAGE)
@pytest.mark.parametrize("position", [0, 2, 4])
def test_one_illegal_page_spoils_the_batch(event: PageEvent, position: int) -> None:
    pool = PagePool(32)
    source = next(state for state, cells in PAGE_TRANSITIONS.items() if event in cells)
    wrong = next(state for state in PageState if state is not source)
    batch = [page_in(pool, source) for _ in range(4)]
    batch.insert(position, page_in(pool, wrong))
    before = picture(pool)
    with pytest.raises(StateError):
        BY_PAGE[event](pool, batch)
    assert picture(pool) == before
    pool.check_integrity()


@pytest.mark.parametrize("bad", [-1, -8, 8, 10**9])
def test_pages_outside_the_pool_are_refused(bad: int) -> None:
    pool = PagePool(8)
    (page,) = taken(pool.allocate(1))
    before = picture(pool)
    for operation in (pool.free, pool.cache, pool.pin, pool.unpin):
        with pytest.raises(StateError):
            operation((page, PageId(bad)))
    assert picture(pool) == before


def test_a_page_named_twice_is_refused() -> None:
    pool = PagePool(8)
    (page,) = taken(pool.allocate(1))
    for operation in (pool.free, pool.cache, pool.pin):
        with pytest.raises(StateError):
            operation((page, page))
    assert pool.count(PageState.OWNED) == 1
    pool.check_integrity()


def test_all_or_nothing() -> None:
    pool = PagePool(5)
    assert pool.allocate(0) == ()
    assert len(taken(pool.allocate(3))) == 3
    assert pool.allocate(3) is None
    assert pool.grant(3) is None
    assert pool.num_free == 2
    assert len(taken(pool.grant(2))) == 2
    assert pool.allocate(1) is None
    assert pool.grant(0) == ()
    with pytest.raises(ValueError):
        pool.allocate(-1)
    pool.check_integrity()


def test_empty_batches_are_ordinary() -> None:
    pool = PagePool(2)
    before = picture(pool)
    for operation in BY_PAGE.values():
        operation(pool, ())
    pool.pin(())
    pool.unpin(())
    assert picture(pool) == before


def test_an_empty_pool_works() -> None:
    pool = PagePool(0)
    assert pool.allocate(0) == ()
    assert pool.allocate(1) is None
    pool.check_integrity()


def test_a_fresh_pool_hands_out_runs() -> None:
    pool = PagePool(100)
    first, second = taken(pool.allocate(10)), taken(pool.grant(10))
    assert first == tuple(range(10))
    assert second == tuple(range(10, 20))


def test_the_state_of_many_pages_is_asked_at_once() -> None:
    pool = PagePool(4)
    owned = taken(pool.allocate(2))
    assert pool.are_all(owned, PageState.OWNED)
    assert not pool.are_all([*owned, PageId(3)], PageState.OWNED)
    assert not pool.are_all(owned, PageState.FREE)
    assert pool.are_all((), PageState.CACHED)


def test_runs_survive_a_round_trip() -> None:
    pool = PagePool(100)
    first = taken(pool.allocate(40))
    taken(pool.allocate(40))
    pool.free(first[20:])
    pool.free(first[:20])
    assert taken(pool.allocate(40)) == first


def test_single_pages_come_one_after_the_other() -> None:
    """A request that grows page by page, alone, gets a run."""
    pool = PagePool(100)
    pool.free(taken(pool.allocate(10)))
    grown = [taken(pool.allocate(1))[0] for _ in range(10)]
    assert grown == list(range(grown[0], grown[0] + 10))


def test_a_generation_is_one_use_of_a_page() -> None:
    pool = PagePool(3)
    seen = {0}
    for n in (1, 2, 3, 3):
        pages = taken(pool.grant(n))
        (generation,) = {pool.generations()[page] for page in pages}
        assert generation not in seen
        seen.add(generation)
        pool.land(pages)
        pool.free(pages)
        assert {pool.generations()[page] for page in pages} == {generation}


def test_ticket_life_in_both_endings() -> None:
    pool = PagePool(4)
    landed, revoked = taken(pool.grant(2)), taken(pool.grant(2))
    pool.land(landed)
    pool.revoke(revoked)
    assert pool.count(PageState.QUARANTINED) == 2
    assert pool.num_free == 0
    pool.free(landed)
    pool.drain(revoked)
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_freed_pinned_page_is_held_until_its_last_pin() -> None:
    pool = PagePool(2)
    pages = taken(pool.allocate(2))
    pool.pin(pages)
    pool.pin(pages[:1])
    pool.free(pages)
    assert (pool.num_free, pool.num_held, pool.count(PageState.FREE)) == (0, 2, 0)
    assert pool.state(pages[0]) is PageState.FREE
    assert pool.allocate(1) is None
    pool.unpin(pages)
    assert (pool.num_free, pool.num_held) == (1, 1)
    assert pool.allocate(1) == pages[1:]
    pool.unpin(pages[:1])
    assert (pool.num_free, pool.num_held, pool.num_pinned) == (1, 0, 0)
    pool.check_integrity()


def test_an_evicted_pinned_page_is_held() -> None:
    pool = PagePool(1)
    pages = taken(pool.allocate(1))
    pool.cache(pages)
    pool.pin(pages)
    pool.evict(pages)
    assert pool.allocate(1) is None
    pool.check_integrity()
    pool.unpin(pages)
    assert pool.allocate(1) == pages


def test_unpinning_a_page_in_use_frees_nothing() -> None:
    pool = PagePool(1)
    pages = taken(pool.allocate(1))
    pool.pin(pages)
    pool.unpin(pages)
    assert pool.state(pages[0]) is PageState.OWNED
    assert pool.num_free == 0
    with pytest.raises(StateError):
        pool.unpin(pages)


@pytest.mark.parametrize("state", [PageState.FREE, PageState.GRANTED, PageState.QUARANTINED])
def test_only_written_pages_can_be_pinned(state: PageState) -> None:
    pool = PagePool(4)
    good, bad = page_in(pool, PageState.OWNED), page_in(pool, state)
    with pytest.raises(StateError):
        pool.pin((good, bad))
    assert pool.num_pinned == 0


def test_a_held_page_cannot_be_pinned_again() -> None:
    pool = PagePool(1)
    pages = taken(pool.allocate(1))
    pool.pin(pages)
    pool.free(pages)
    with pytest.raises(StateError):
        pool.pin(pages)


def test_unpin_is_all_or_nothing() -> None:
    pool = PagePool(2)
    pages = taken(pool.allocate(2))
    pool.pin(pages[:1])
    with pytest.raises(StateError):
        pool.unpin(pages)
    assert pool.num_pinned == 1


def taken_away(pool: PagePool) -> int:
    page = pool._free.take_one()
    assert page is not None
    return page


def _miscount_the_free_ones(pool: PagePool) -> None:
    pool._free._num_in_runs -= 1


def _lose_a_page(pool: PagePool) -> None:
    pool._free.take(1)


def _free_twice(pool: PagePool) -> None:
    pool._free.give_back([5])


def _offer_a_page_in_use(pool: PagePool) -> None:
    pool._free.take(1)
    pool._free.give_back([0])


def _miscount(pool: PagePool) -> None:
    pool._counts[PageState.OWNED.value] += 1


def _hold_without_pin(pool: PagePool) -> None:
    pool._held.add(taken_away(pool))


def _hold_and_offer(pool: PagePool) -> None:
    pool._held.add(5)


def _pin_a_free_page(pool: PagePool) -> None:
    pool._pins[5] = 1


def _pin_zero_times(pool: PagePool) -> None:
    pool._pins[0] = 0


@pytest.mark.parametrize(
    "corrupt",
    [
        _lose_a_page,
        _miscount_the_free_ones,
        _free_twice,
        _offer_a_page_in_use,
        _miscount,
        _hold_without_pin,
        _hold_and_offer,
        _pin_a_free_page,
        _pin_zero_times,
    ],
)
def test_check_integrity_sees(corrupt: Callable[[PagePool], None]) -> None:
    pool = PagePool(6)
    taken(pool.allocate(2))
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()
