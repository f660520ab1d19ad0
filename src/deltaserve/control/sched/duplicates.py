"""Who waits for whom: what a running request computes of a waiting one's prompt, that one takes from the tree later.

Where pages are all that continuing takes, it waits for a request that computes its next page, until that one has handed
over the last page the two have in common. Where it takes a recurrent state too, pages alone help nobody: the running
request is cut at the last checkpoint that the two can have in common, if it has not come past that, and is waited for
so far. What waits further behind may be tried too late for that: a request that starts looks at some of those itself.

This is a choice, not a lack of memory: it keeps nobody behind the request from being admitted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from deltaserve.control.cache.prefix_cache import Match
from deltaserve.control.sched.checkpoints import Checkpoints
from deltaserve.control.sched.request import Request
from deltaserve.core.keys import KEY_BYTES, common_keys

Frontier = dict[bytes, list[Request]]
"""Key of a page |-> the requests that a waiting one finds by it."""

_FORESEEN = 16
"""A request that starts is compared with so many of those that wait and begin with the same page."""


class Duplicates:
    """Waiting requests held back, and what for."""

    def __init__(
        self, page_size: int, is_computing: Callable[[Request], bool], checkpoints: Checkpoints | None = None
    ) -> None:
        """`checkpoints`: of a model with recurrent states."""
        self._page_size = page_size
        self._is_computing = is_computing
        """Whether a request runs and will hand pages of its prompt to the tree."""
        self._checkpoints = checkpoints
        self._waits: dict[Request, tuple[Request, int]] = {}  # waiting |-> (running, pages it will have handed over)
        self._alike: dict[bytes, dict[Request, None]] = {}  # key of the first page |-> waiting; with states only

    def add(self, request: Request) -> None:
        """Note that the request waits."""
        if self._checkpoints is not None and (key := self._key_after(request, 0)):
            self._alike.setdefault(key, {})[request] = None

    def foresee(self, request: Request) -> None:
        """Note that the request starts: where most of those that wait part from it, it leaves a state."""
        alike = self._alike.get(self._key_after(request, 0))
        if self._checkpoints is None or alike is None:
            return
        points = Counter(self._parting(request, other, self._checkpoints) for other in islice(alike, _FORESEEN))
        points = Counter({point: count for point, count in points.items() if point > request.num_computed})
        request.forks.update(point for point, _ in points.most_common(1))

    def frontier(self, requests: Iterable[Request]) -> Frontier:
        """Requests that compute, by the page that each is computing; with states by their first page."""
        frontier: Frontier = {}
        for request in requests:
            self.note(request, frontier)
        return frontier

    def note(self, request: Request, frontier: Frontier) -> None:
        """Add one, if it computes."""
        if request.lease is not None and self._is_computing(request):
            in_tree = request.num_computed if request.late_to_share else request.lease.num_tokens
            key = self._key_after(request, in_tree if self._checkpoints is None else 0)
            if key:
                frontier.setdefault(key, []).append(request)

    def is_to_wait(self, request: Request, match: Match, frontier: Frontier) -> bool:
        """Whether the request had better wait; then `holds_back` says for how long."""
        if self._checkpoints is None:
            wait = self._for_pages(request, match, frontier)
        else:
            wait = self._for_checkpoint(request, match, frontier, self._checkpoints)
        if wait is not None:
            self._waits[request] = wait
        return wait is not None

    def _for_pages(self, request: Request, match: Match, frontier: Frontier) -> tuple[Request, int] | None:
        others = frontier.get(self._key_after(request, match.num_tokens))
        return (others[-1], common_keys(request.keys, others[-1].keys)) if others else None

    def _for_checkpoint(
        self, request: Request, match: Match, frontier: Frontier, checkpoints: Checkpoints
    ) -> tuple[Request, int] | None:
        """The request in flight with most in common up to a checkpoint that it can still leave, and is now to leave."""
        furthest, best = match.num_tokens, None
        for other in frontier.get(self._key_after(request, 0), ()):
            point = self._parting(other, request, checkpoints)
            if point > furthest and other.num_planned <= point and other.num_computed < point:
                furthest, best = point, other
        if best is None:
            return None
        best.forks.add(furthest)
        return best, furthest // self._page_size

    def _parting(self, ahead: Request, behind: Request, checkpoints: Checkpoints) -> int:
        """The last checkpoint that `ahead` can leave and `behind` go on from."""
        num_common = common_keys(ahead.keys, behind.keys) * self._page_size
        return checkpoints.last(min(num_common, behind.num_tokens - 1, ahead.num_tokens))

    def _key_after(self, request: Request, num_tokens: int) -> bytes:
        """Key of the page from `num_tokens` on; empty when the prompt has no full page there."""
        first = num_tokens // self._page_size * KEY_BYTES
        return bytes(request.keys[first : first + KEY_BYTES])

    def holds_back(self, request: Request) -> bool:
        """Whether the request still has something to wait for. Constant time."""
        wait = self._waits.get(request)
        if wait is None:
            return False
        other, num_pages = wait
        if self._is_computing(other) and other.lease is not None and other.lease.num_pages < num_pages:
            return True
        del self._waits[request]
        return False

    def started(self, request: Request) -> None:
        """Note that the request waits no longer; what it computes may be waited for."""
        key = self._key_after(request, 0)
        if (alike := self._alike.get(key)) is not None:
            alike.pop(request, None)
            if not alike:
                del self._alike[key]

    def forget(self, request: Request) -> None:
        """The request waits no longer, for whatever reason."""
        self._waits.pop(request, None)
        self.started(request)
