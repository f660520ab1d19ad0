"""Who waits for whom: a request whose next page is being computed by a running one takes it from the tree later.

It waits while that one extends and has not yet handed over the last page the two have in common. This is a choice, not
a lack of memory: it keeps nobody behind it from being admitted.
"""

from collections.abc import Callable, Iterable

from deltaserve.base.keys import KEY_BYTES, common_keys
from deltaserve.request.request import Request


class Twins:
    """Waiting requests held back, and what for."""

    def __init__(self, page_size: int, is_computing: Callable[[Request], bool]) -> None:
        self._page_size = page_size
        self._is_computing = is_computing
        """Whether a request runs and will hand pages of its prompt to the tree."""
        self._waits: dict[Request, tuple[Request, int]] = {}  # waiting |-> (running, pages in common)

    def key_after(self, request: Request, num_tokens: int) -> bytes:
        """Key of the page from `num_tokens` on; empty when the prompt has no full page there."""
        first = num_tokens // self._page_size * KEY_BYTES
        return bytes(request.keys[first : first + KEY_BYTES])

    def frontier(self, requests: Iterable[Request]) -> dict[bytes, Request]:
        """Key of the page that each of `requests` is computing |-> the request."""
        found: dict[bytes, Request] = {}
        for request in requests:
            if request.lease is not None and self._is_computing(request):
                key = self.key_after(request, request.lease.num_tokens)
                if key:
                    found[key] = request
        return found

    def hold_back(self, request: Request, twin: Request) -> None:
        self._waits[request] = (twin, common_keys(request.keys, twin.keys))

    def holds_back(self, request: Request) -> bool:
        """Whether the request still has something to wait for. Constant time."""
        wait = self._waits.get(request)
        if wait is None:
            return False
        twin, num_common = wait
        if self._is_computing(twin) and twin.lease is not None and twin.lease.num_pages < num_common:
            return True
        del self._waits[request]
        return False

    def forget(self, request: Request) -> None:
        """The request waits no longer, for whatever reason."""
        self._waits.pop(request, None)
