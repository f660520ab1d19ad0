"""PagePool against a dictionary, under random operations, legal and illegal."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PAGE_TRANSITIONS, PageEvent, PageState
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PageId

OPERATIONS: dict[PageEvent, Callable[[PagePool, list[PageId]], None]] = {
    PageEvent.LAND: PagePool.land,
    PageEvent.REVOKE: PagePool.revoke,
    PageEvent.DRAIN: PagePool.drain,
    PageEvent.FREE: PagePool.free,
    PageEvent.CACHE: PagePool.cache,
    PageEvent.EVICT: PagePool.evict,
}
PINNABLE = {PageState.OWNED, PageState.CACHED}


class AllocatorMachine(RuleBasedStateMachine):
    """The model: state and pins of each page, in plain dictionaries."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        pages = [PageId(page) for page in range(num_pages)]
        self.states = dict.fromkeys(pages, PageState.FREE)
        self.pins = dict.fromkeys(pages, 0)

    def within_reach(self) -> list[PageId]:
        return [page for page, state in self.states.items() if state is PageState.FREE and not self.pins[page]]

    @rule(n=st.integers(0, 6), event=st.sampled_from([PageEvent.ALLOCATE, PageEvent.GRANT]))
    def take(self, n: int, event: PageEvent) -> None:
        reach, before = self.within_reach(), self.pool.generations()
        pages = self.pool.allocate(n) if event is PageEvent.ALLOCATE else self.pool.grant(n)
        if n > len(reach):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == n
        assert list(pages) == sorted(set(pages) & set(reach))
        after = self.pool.generations()
        assert [page for page in self.states if after[page] != before[page]] == list(pages)
        for page in pages:
            self.states[page] = PAGE_TRANSITIONS[PageState.FREE][event]

    @rule(data=st.data(), event=st.sampled_from(list(OPERATIONS)))
    def move(self, data: st.DataObject, event: PageEvent) -> None:
        """Legal: any subset of the pages in the event's state."""
        legal = [page for page, state in self.states.items() if event in PAGE_TRANSITIONS[state]]
        batch = data.draw(st.lists(st.sampled_from(legal), unique=True)) if legal else []
        OPERATIONS[event](self.pool, batch)
        for page in batch:
            self.states[page] = PAGE_TRANSITIONS[self.states[page]][event]

    @rule(data=st.data(), event=st.sampled_from(list(OPERATIONS)))
    def move_anything(self, data: st.DataObject, event: PageEvent) -> None:
        """Any batch at all: it moves as a whole or not."""
        batch = data.draw(st.lists(st.sampled_from(list(self.states)), max_size=5))
        legal = all(event in PAGE_TRANSITIONS[self.states[page]] for page in batch)
        if legal and len(set(batch)) == len(batch):
            OPERATIONS[event](self.pool, batch)
            for page in batch:
                self.states[page] = PAGE_TRANSITIONS[self.states[page]][event]
        else:
            with pytest.raises(StateError):
                OPERATIONS[event](self.pool, batch)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        batch = data.draw(st.lists(st.sampled_from(list(self.states)), unique=True, max_size=5))
        if all(self.states[page] in PINNABLE for page in batch):
            self.pool.pin(batch)
            for page in batch:
                self.pins[page] += 1
        else:
            with pytest.raises(StateError):
                self.pool.pin(batch)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [page for page, pins in self.pins.items() if pins]
        batch = data.draw(st.lists(st.sampled_from(pinned), unique=True))
        self.pool.unpin(batch)
        for page in batch:
            self.pins[page] -= 1

    @rule(data=st.data())
    def unpin_too_much(self, data: st.DataObject) -> None:
        bare = [page for page, pins in self.pins.items() if not pins]
        if bare:
            with pytest.raises(StateError):
                self.pool.unpin([data.draw(st.sampled_from(bare))])

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert {page: pool.state(page) for page in self.states} == self.states
        assert pool.num_free == len(self.within_reach())
        held = [page for page, state in self.states.items() if state is PageState.FREE and self.pins[page]]
        assert pool.num_held == len(held)
        assert sum(pool.count(state) for state in PageState) + pool.num_held == pool.num_pages


AllocatorMachine.TestCase.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
TestAllocator = AllocatorMachine.TestCase
