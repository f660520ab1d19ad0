"""Waiting requests that hold memory meanwhile: a lease on the prefix they will need, a prompt computed ahead.

What they hold saves work later; it must not stop work now. So it yields, the youngest's first: to whoever stands before
them in the queue, to whoever stalls the queue (the order of trying is not that of arrival: one of those that are not
tried may hold what it waits for), and to running rows before one of those is retracted. Only those are asked that hold
something of a pool that is short: a prefix whose KV is leased gives nobody a slot for a state.
"""

import heapq
from collections.abc import Callable, Sequence

from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PoolId

FULL = PoolId(0)
"""The pool of FULL pages: whoever holds anything holds some of it."""
_Place = tuple[bool, bool, float]
_SPARE = 64
"""Outdated entries are kept up to so many more than there are others."""


class Holders:
    """Waiting requests that may be asked to give up what they hold. Each call costs the logarithm of their number."""

    def __init__(self, is_queued: Callable[[Request], bool], take_memory: Callable[[Request], None]) -> None:
        """`is_queued`: whether the memory it waits for is this worker's. Others yield before those that are."""
        self._is_queued = is_queued
        self._take_memory = take_memory
        self._yielded: list[Request] = []
        self._places: dict[Request, _Place] = {}
        self._last_first: list[tuple[_Place, int, Request]] = []
        """A heap; entries whose place is not the request's own any more are passed over."""
        self._num_added = 0

    def __contains__(self, request: Request) -> bool:
        return request in self._places

    def add(self, request: Request) -> None:
        """Add a request, or note that its place in the queue has changed."""
        place = self._place(request)
        if self._places.get(request) == place:
            return
        self._places[request] = place
        self._num_added += 1
        heapq.heappush(self._last_first, (place, self._num_added, request))
        if len(self._last_first) > 2 * len(self._places) + _SPARE:
            self._last_first = [entry for entry in self._last_first if self._places.get(entry[2]) == entry[0]]
            heapq.heapify(self._last_first)

    def discard(self, request: Request) -> None:
        self._places.pop(request, None)

    def reclaim(self, holder: Request) -> None:
        """Make the request give up what it holds."""
        self.discard(holder)
        self._take_memory(holder)
        self._yielded.append(holder)

    @property
    def has_yielded(self) -> bool:
        """Whether somebody is still to be taken by `take_yielded`."""
        return bool(self._yielded)

    def take_yielded(self) -> list[Request]:
        """Requests that gave up what they held since the last call."""
        taken, self._yielded = self._yielded, []
        return taken

    def youngest(self, short: Sequence[PoolId]) -> Request | None:
        """The request that is to yield next, among those that hold pages of a pool in `short`."""
        if FULL in short:
            return self._youngest()
        return min(self._holding(short), key=self._places.__getitem__, default=None)

    def _holding(self, short: Sequence[PoolId]) -> list[Request]:
        return [request for request in self._places if any(map(request.num_held, short))]

    def _youngest(self) -> Request | None:
        """The youngest of all holders: they hold FULL pages. None: nobody holds anything."""
        while self._last_first:
            place, _, request = self._last_first[0]
            if self._places.get(request) == place:
                return request
            heapq.heappop(self._last_first)
        return None

    def youngest_behind(self, request: Request, short: Sequence[PoolId]) -> Request | None:
        """The next to yield among all others, if it stands behind `request` in the queue, or beside it.

        Of two samples that came at once either yields to the other: else each would wait for the other's pages.
        """
        holder = self.youngest_but(request, short)
        return holder if holder is not None and self._places[holder] <= self._place(request) else None

    def youngest_but(self, request: Request, short: Sequence[PoolId]) -> Request | None:
        """The next to yield among all others."""
        if FULL not in short:
            others = (holder for holder in self._holding(short) if holder is not request)
            return min(others, key=self._places.__getitem__, default=None)
        own = []
        while (holder := self._youngest()) is request:  # more than one entry if it has come back to this place
            own.append(heapq.heappop(self._last_first))
        for entry in own[:1]:
            heapq.heappush(self._last_first, entry)
        return holder

    def _place(self, request: Request) -> _Place:
        """Place of a request in the order of giving up; smaller: further behind in the queue."""
        return self._is_queued(request), request.is_urgent, -request.arrival
