"""PagePool: the states of all pages of one pool, and the only place that changes them."""

from collections.abc import Collection
from itertools import chain, starmap
from operator import itemgetter
from typing import NamedTuple

from deltaserve.control.cache.free_pages import FreePages
from deltaserve.control.cache.pages import PageEvent, PageState, ends_of
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.ids import PageId


class _Move(NamedTuple):
    """An event as the methods need it: hashing an enum takes longer than moving a page."""

    event: PageEvent
    number: int
    source: int
    target: int


def _move_of(event: PageEvent) -> _Move:
    source, target = ends_of(event)
    return _Move(event, list(PageEvent).index(event), source.value, target.value)


_MOVES = {event: _move_of(event) for event in PageEvent}
_ALLOCATE, _GRANT = _MOVES[PageEvent.ALLOCATE], _MOVES[PageEvent.GRANT]
_LAND, _REVOKE, _DRAIN = _MOVES[PageEvent.LAND], _MOVES[PageEvent.REVOKE], _MOVES[PageEvent.DRAIN]
_FREED, _CACHE, _EVICT = _MOVES[PageEvent.FREE], _MOVES[PageEvent.CACHE], _MOVES[PageEvent.EVICT]
_FREE = PageState.FREE.value
_BYTE_OF = tuple(bytes([value]) for value in range(len(PageState)))
_PINNABLE = frozenset((PageState.OWNED.value, PageState.CACHED.value))


class PagePool:
    """Pages [0, num_pages) of one pool id. Page ids are equal on all ranks: rank 0 decides, the others replay.

    Every batch operation is all or nothing: one illegal page (wrong state, out of range, twice in the batch) raises
    StateError and changes nothing. A *pin* keeps a page's bytes in place while a write reads them: a pinned page may be
    freed or evicted by its owner, but then it is *held*, out of reach of `allocate`, until its last pin is gone.

    FREE + held + GRANTED + OWNED + QUARANTINED + CACHED = num_pages, always.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._state = bytearray(num_pages)  # page |-> PageState value; FREE is 0
        self._counts = [0] * len(PageState)  # PageState value |-> pages in it, held ones among FREE
        self._counts[_FREE] = num_pages
        self._free = FreePages(num_pages)
        self._generation = [0] * num_pages  # page |-> number of the take that handed it out last
        self._num_takes = 0
        self._num_moved = [0] * len(PageEvent)  # by _Move.number
        self._pins: dict[int, int] = {}  # pinned page |-> pins, >= 1
        self._held: set[int] = set()  # pinned pages whose state is FREE

    @property
    def moves(self) -> dict[PageEvent, int]:
        """Pages that each event has moved since the start."""
        return dict(zip(PageEvent, self._num_moved, strict=True))

    @property
    def num_moved(self) -> int:
        """How many pages were moved, over all events."""
        return sum(self._num_moved)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` or `grant` could hand out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages given back by their owner, but still pinned."""
        return len(self._held)

    @property
    def num_pinned(self) -> int:
        """Pages with at least one pin, whatever their state."""
        return len(self._pins)

    def count(self, state: PageState) -> int:
        """Pages in `state`. FREE counts allocatable pages only: held ones are `num_held`."""
        return len(self._free) if state is PageState.FREE else self._counts[state]

    def state(self, page: PageId) -> PageState:
        """State of one page; a held page is FREE."""
        return PageState(self._state[page])

    def are_all(self, pages: Collection[PageId], state: PageState) -> bool:
        """Whether each of these pages, none of them named twice, is in `state`."""
        return not pages or self._states_of(pages) == {state.value}

    def states(self) -> bytes:
        """State of every page as a byte: its `PageState.value`."""
        return bytes(self._state)

    def generations(self) -> list[int]:
        """Generation of every page: how often it was handed out. Another number means that another use of it began."""
        return list(self._generation)

    def is_pinned(self, page: PageId) -> bool:
        return page in self._pins

    def allocate(self, n: int) -> tuple[PageId, ...] | None:
        """n pages, FREE -> OWNED, ascending; None when fewer are free."""
        return self._take(n, _ALLOCATE)

    def grant(self, n: int) -> tuple[PageId, ...] | None:
        """n pages, FREE -> GRANTED, ascending; None when fewer are free."""
        return self._take(n, _GRANT)

    def land(self, pages: Collection[PageId]) -> None:
        """GRANTED -> OWNED: the ticket's Done was accepted."""
        self._move(pages, _LAND)

    def revoke(self, pages: Collection[PageId]) -> None:
        """GRANTED -> QUARANTINED: the ticket was withdrawn, writes may still land."""
        self._move(pages, _REVOKE)

    def drain(self, pages: Collection[PageId]) -> None:
        """QUARANTINED -> FREE: a clean Drained, a complete Done, or a fence."""
        self._move(pages, _DRAIN)
        self._give_back(pages)

    def free(self, pages: Collection[PageId]) -> None:
        """Move pages from OWNED to FREE."""
        self._move(pages, _FREED)
        self._give_back(pages)

    def cache(self, pages: Collection[PageId]) -> None:
        """OWNED -> CACHED. For the prefix cache only."""
        self._move(pages, _CACHE)

    def evict(self, pages: Collection[PageId]) -> None:
        """CACHED -> FREE. For the prefix cache only."""
        self._move(pages, _EVICT)
        self._give_back(pages)

    def require(self, pages: Collection[PageId], event: PageEvent) -> None:
        """Raise StateError unless `event` is legal for every one of `pages`, each named once."""
        self._require(pages, _MOVES[event])

    def pin(self, pages: Collection[PageId]) -> None:
        """Hold the bytes of OWNED or CACHED pages in place. Nests."""
        if pages and not self._states_of(pages) <= _PINNABLE:
            raise StateError("pin of pages not all OWNED or CACHED")
        pins = self._pins
        for page in pages:
            pins[page] = pins.get(page, 0) + 1

    def unpin(self, pages: Collection[PageId]) -> None:
        """Undo one `pin`; held pages whose last pin this was become allocatable."""
        pins = self._pins
        if len(set(pages)) != len(pages) or any(page not in pins for page in pages):
            raise StateError("unpin of pages not all pinned")
        for page in pages:
            pins[page] -= 1
            if not pins[page]:
                del pins[page]
        released = [page for page in pages if page in self._held and page not in pins]
        self._held.difference_update(released)
        self._free.give_back(released)

    def check_integrity(self) -> None:
        """Recount everything. Raises IntegrityError where a count is wrong."""
        self._check_counts()
        self._check_free_list()
        if any(count < 1 for count in self._pins.values()):
            raise IntegrityError("a pin count below 1 is kept")
        if not self._held <= self._pins.keys():
            raise IntegrityError("held pages without a pin")
        stray = [page for page in self._pins.keys() - self._held if self._state[page] not in _PINNABLE]
        if stray:
            raise IntegrityError(f"pinned pages neither held, OWNED nor CACHED: {sorted(stray)[:8]}")

    def _take(self, n: int, move: _Move) -> tuple[PageId, ...] | None:
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        if n == 1:
            return self._take_one(move)
        runs = self._free.take(n)
        if runs is None:
            return None
        self._num_takes += 1
        byte, generation = _BYTE_OF[move.target], [self._num_takes]
        for first, end in runs:
            self._state[first:end] = byte * (end - first)
            self._generation[first:end] = generation * (end - first)
        self._count(n, move)
        return tuple(chain.from_iterable(starmap(range, runs)))  # type: ignore[arg-type]

    def _take_one(self, move: _Move) -> tuple[PageId] | None:
        page = self._free.take_one()
        if page is None:
            return None
        self._num_takes += 1
        self._generation[page] = self._num_takes
        self._state[page] = move.target
        self._count(1, move)
        return (page,)  # type: ignore[return-value]

    def _move(self, pages: Collection[PageId], move: _Move) -> None:
        self._require(pages, move)
        state, target = self._state, move.target
        for page in pages:
            state[page] = target
        self._count(len(pages), move)

    def _count(self, n: int, move: _Move) -> None:
        _, number, source, target = move
        self._counts[source] -= n
        self._counts[target] += n
        self._num_moved[number] += n

    def _require(self, pages: Collection[PageId], move: _Move) -> None:
        if pages and self._states_of(pages) != {move.source}:
            offender = self._offender(pages, move.source)
            raise StateError(f"{move.event.value} of pages not all {PageState(move.source).name}: {offender}")

    def _give_back(self, pages: Collection[PageId]) -> None:
        """Put pages that just became FREE within reach again, the pinned ones among them apart."""
        if self._pins:
            self._held.update(page for page in pages if page in self._pins)
            pages = [page for page in pages if page not in self._pins]
        self._free.give_back(pages)

    def _states_of(self, pages: Collection[int]) -> set[int]:
        """Distinct state values. Runs in C: 128 pages take about 4 us."""
        if len(set(pages)) != len(pages):
            raise StateError("a page is named twice")
        try:
            found: int | tuple[int, ...] = itemgetter(*pages)(self._state)
        except IndexError:
            found = ()
        if min(pages) < 0 or found == ():
            raise StateError(f"a page is outside [0, {self.num_pages})")
        return set(found) if isinstance(found, tuple) else {found}

    def _offender(self, pages: Collection[PageId], source: int) -> str:
        page = next(page for page in pages if self._state[page] != source)
        return f"page {page} is {PageState(self._state[page]).name}"

    def _check_counts(self) -> None:
        found = [self._state.count(state.value) for state in PageState]
        if found != self._counts:
            raise IntegrityError(f"pages per state: counted {found}, kept {self._counts}")

    def _check_free_list(self) -> None:
        pages = list(self._free)
        free = set(pages)
        if len(free) != len(pages) or len(pages) != len(self._free):
            raise IntegrityError("a page is twice in the free list, or its length is miscounted")
        if free & self._held:
            raise IntegrityError("a held page is in the free list")
        if free | self._held and self._states_of(free | self._held) != {_FREE}:
            raise IntegrityError("a page in the free list or held is in use")
        if len(free) + len(self._held) != self._counts[_FREE]:
            raise IntegrityError("a FREE page is neither in the free list nor held")
