"""The order in which waiting requests are admitted: arrival, with bounded overtaking.

One request that does not fit must not stall those that do, and must not be passed for ever: it may be overtaken
`MAX_OVERTAKES` times or for `MAX_WAIT_S`; from then on nobody behind it is admitted before it.
"""

from collections import deque
from collections.abc import Callable, Iterator

from deltaserve.cache.prefix_cache import PrefixCache
from deltaserve.request.request import Request

MAX_OVERTAKES = 8
MAX_WAIT_S = 1.0
MAX_RANK = 2**63
MAX_TRIES = 16
"""Requests that find no room per admission, so that a long queue costs little more than a short one."""


Rank = Callable[[Request], int]
"""request |-> how much it is worth to admit it now; more goes first."""

_RANKED = 64
"""Waiting requests that are ranked at a time, so that a long queue costs no more than a short one."""


def by_arrival(cache: PrefixCache) -> Rank | None:
    """First come, first served."""
    return None


def by_cached_prefix(cache: PrefixCache) -> Rank:
    """Longest cached prefix first: computes least, and puts rows that share pages into one batch (SGLang's `lpm`)."""

    def rank(request: Request) -> int:
        return cache.match(request.namespace, bytes(request.tokens), bytes(request.keys)).num_tokens

    return rank


POLICIES: dict[str, Callable[[PrefixCache], Rank | None]] = {"fcfs": by_arrival, "lpm": by_cached_prefix}
"""Value of --schedule-policy |-> how waiting requests are ranked."""


class AdmissionQueue:
    """Waiting requests in order of arrival, retracted ones before all others."""

    def __init__(self, rank: Rank | None = None) -> None:
        self._rank = rank
        self._queue: deque[Request] = deque()
        self._blocked_since: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def in_order(self) -> list[Request]:
        """All of them as they should be tried: by rank, but those overtaken too often first."""
        if self._rank is None or len(self._queue) < 2:
            return list(self._queue)
        requests = list(self._queue)
        head = requests[:_RANKED]
        ranks = {r: MAX_RANK if r.overtaken >= MAX_OVERTAKES else self._rank(r) for r in head}
        return [*sorted(head, key=lambda r: -ranks[r]), *requests[_RANKED:]]

    @property
    def num_tokens(self) -> int:
        """Tokens waiting to be computed, cache hits not deducted."""
        return sum(request.num_tokens for request in self._queue)

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def push_first(self, request: Request) -> None:
        self._queue.appendleft(request)

    def may_overtake(self, blocked: Request, now: float) -> bool:
        """Whether those behind `blocked`, which could not be admitted just now, may go before it."""
        since = self._blocked_since.setdefault(blocked, now)
        return blocked.overtaken < MAX_OVERTAKES and now - since < MAX_WAIT_S

    def remove(self, request: Request) -> None:
        """Admitted: everyone still before it was overtaken once."""
        for earlier in self._queue:
            if earlier is request:
                break
            earlier.overtaken += 1
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Forget a request; not being queued is fine."""
        self._blocked_since.pop(request, None)
        if request in self._queue:
            self._queue.remove(request)
