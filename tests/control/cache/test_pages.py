"""The page table as data."""

from deltaserve.control.cache.pages import PAGE_TRANSITIONS, PageEvent, PageState, ends_of


def test_table_has_exactly_these_cells() -> None:
    cells = {(state, event, target) for state, row in PAGE_TRANSITIONS.items() for event, target in row.items()}
    assert cells == {
        (PageState.FREE, PageEvent.ALLOCATE, PageState.OWNED),
        (PageState.FREE, PageEvent.GRANT, PageState.GRANTED),
        (PageState.GRANTED, PageEvent.LAND, PageState.OWNED),
        (PageState.GRANTED, PageEvent.REVOKE, PageState.QUARANTINED),
        (PageState.QUARANTINED, PageEvent.DRAIN, PageState.FREE),
        (PageState.OWNED, PageEvent.FREE, PageState.FREE),
        (PageState.OWNED, PageEvent.CACHE, PageState.CACHED),
        (PageState.CACHED, PageEvent.EVICT, PageState.FREE),
    }


def test_every_state_and_event_is_in_the_table() -> None:
    assert set(PAGE_TRANSITIONS) == set(PageState)
    for event in PageEvent:
        source, target = ends_of(event)
        assert PAGE_TRANSITIONS[source][event] is target


def test_a_granted_page_never_becomes_free_in_one_step() -> None:
    assert PageState.FREE not in PAGE_TRANSITIONS[PageState.GRANTED].values()
