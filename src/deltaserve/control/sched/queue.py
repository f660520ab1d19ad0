"""The order in which waiting requests are tried: arrival, with bounded overtaking.

One request that does not fit must not stall those that do, and must not be passed for ever: it may be overtaken
`MAX_OVERTAKES` times or for `MAX_WAIT_S`; from then on nobody behind it is tried before it has been taken.
Where steps or rows are what is short, nobody is refused, and a ranking may pass somebody as often as it says: then
one is taken by arrival.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from deltaserve.control.sched.policy import Ranking
from deltaserve.control.sched.request import Request

MAX_OVERTAKES = 8
MAX_WAIT_S = 1.0
MAX_TRIES = 16
"""Requests that find no room per call, so that a long queue costs little more than a short one."""
_MAX_RANK = 2**63


class TryOutcome(Enum):
    """What trying one request came to."""

    TAKEN = "taken"
    NO_ROOM = "no room"
    """Memory is missing: those that go before it from now on are counted."""
    HELD_BACK = "held back"
    """It waits for something else (a request that computes the same pages, its reader, the steps already booked):
    it holds up nobody, and being passed is not counted."""


Attempt = Callable[[Request], TryOutcome]


@dataclass(slots=True)
class _Wait:
    overtaken: int = 0
    refused_since: float | None = None


class FairQueue:
    """Waiting requests: urgent ones first (retracted, or granted by their reader), each kind by arrival."""

    def __init__(self, ranking: Ranking | None = None) -> None:
        self._ranking = ranking
        self._max_passed = None if ranking is None else ranking.max_passed
        self._urgent: dict[Request, _Wait] = {}
        self._normal: dict[Request, _Wait] = {}
        self.num_pushed = 0
        self.num_discarded = 0
        self._new: dict[Request, None] = {}
        """Requests not tried since they came."""
        self._refused: list[_Wait] = []
        """Waits of those that found no room when they were tried last, in order."""
        self._is_blocked = False
        """Whether none behind the last of `_refused` was tried."""
        self._stallers: set[Request] = set()
        """Requests that were refused so often or for so long that nobody behind them was tried."""
        self._num_passed = 0
        """Requests taken by rank while an older one waited, since one was taken by arrival."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._normal)

    def __iter__(self) -> Iterator[Request]:
        yield from sorted(self._urgent, key=lambda r: r.arrival)
        yield from self._normal

    def __contains__(self, request: Request) -> bool:
        return request in self._urgent or request in self._normal

    def is_stalled_by(self, request: Request) -> bool:
        """Whether those behind this one wait until it has found room."""
        return request in self._stallers

    @property
    def is_stalled(self) -> bool:
        """Whether somebody waits for memory before all behind it."""
        return bool(self._stallers)

    def push(self, request: Request) -> None:
        """Queue a request by arrival, or before all that are not urgent."""
        queue = self._urgent if request.is_urgent else self._normal
        queue[request] = _Wait()
        self._new[request] = None
        self.num_pushed += 1

    def discard(self, request: Request) -> None:
        """Forget a request; one that is not queued is left alone."""
        self._new.pop(request, None)
        self._stallers.discard(request)
        for queue in (self._urgent, self._normal):
            if queue.pop(request, None) is not None:
                self.num_discarded += 1

    def take(self, attempt: Attempt, now: float) -> list[Request]:
        """Try requests in order and return those taken, which are queued no longer."""
        self._refused, self._is_blocked = [], False
        return self._take(self._in_order(), attempt, now)

    def take_new(self, attempt: Attempt, now: float) -> list[Request]:
        """Try new requests alone, where those tried before would fare as before, and none of them has gone."""
        if self._ranking is not None or any(request in self._urgent for request in self._new):
            return self.take(attempt, now)
        is_blocked = self._is_blocked or not all(_may_be_overtaken(wait, now) for wait in self._refused)
        return self._take([] if is_blocked else list(self._new), attempt, now)

    def _take(self, requests: Iterable[Request], attempt: Attempt, now: float) -> list[Request]:
        self._new.clear()
        taken: list[Request] = []
        for request in requests:
            match attempt(request):
                case TryOutcome.TAKEN:
                    self._note_passed(request)
                    self.discard(request)
                    taken.append(request)
                    for wait in self._refused:
                        wait.overtaken += 1
                case TryOutcome.NO_ROOM:
                    wait = self._wait_of(request)
                    self._refused.append(wait)
                    if is_stalling := not _may_be_overtaken(wait, now):
                        self._stallers.add(request)
                    if len(self._refused) == MAX_TRIES or is_stalling:
                        self._is_blocked = True
                        break
                case TryOutcome.HELD_BACK:
                    self._stallers.discard(request)
        return taken

    def _in_order(self) -> Iterable[Request]:
        """Requests by rank, but those overtaken too often first."""
        if self._ranking is None or len(self) < 2:
            return list(self)
        requests, rank = list(self), self._ranking.rank
        head = requests[len(self._urgent) :][: self._ranking.most]
        ranks = {r: _MAX_RANK if self._normal[r].overtaken >= MAX_OVERTAKES else rank(r) for r in head}
        urgent, rest = requests[: len(self._urgent)], requests[len(self._urgent) + len(head) :]
        return chain(urgent, self._by_turns(sorted(head, key=lambda r: -ranks[r]), head), rest)

    def _by_turns(self, ranked: Sequence[Request], by_arrival: Sequence[Request]) -> Iterator[Request]:
        """The same requests in two orders: by rank, and by arrival while it is somebody's turn who was passed. Whose
        turn it is depends on who was taken so far."""
        orders = {False: iter(ranked), True: iter(by_arrival)}
        tried: set[Request] = set()
        for _ in ranked:
            request = next(r for r in orders[self._is_turn_of_oldest] if r not in tried)
            tried.add(request)
            yield request

    @property
    def _is_turn_of_oldest(self) -> bool:
        """Whether so many were passed that the next one is taken by arrival."""
        return self._max_passed is not None and self._num_passed >= self._max_passed

    def _note_passed(self, taken: Request) -> None:
        """`taken` leaves the queue, maybe before older ones. Urgent ones are not passed, and pass nobody."""
        if self._max_passed is not None and taken in self._normal:
            is_oldest = taken is next(iter(self._normal))
            self._num_passed = 0 if is_oldest or self._is_turn_of_oldest else self._num_passed + 1

    def _wait_of(self, request: Request) -> _Wait:
        return self._urgent[request] if request in self._urgent else self._normal[request]


def _may_be_overtaken(wait: _Wait, now: float) -> bool:
    if wait.refused_since is None:
        wait.refused_since = now
    return wait.overtaken < MAX_OVERTAKES and now - wait.refused_since < MAX_WAIT_S
