"""Waiting requests that hold memory meanwhile: a lease on the prefix they will need, a prompt computed ahead.

What they hold saves work later; it must not stop work now. So it yields, the youngest's first: to whoever stands before
them in the queue, and to running rows before one of those is retracted.
"""

from collections.abc import Callable

from deltaserve.request.request import Request


class Holders:
    """Those that may be asked to give up what they hold."""

    def __init__(self, is_queued: Callable[[Request], bool]) -> None:
        """`is_queued`: whether the memory it waits for is this worker's. Others yield before those that are."""
        self._is_queued = is_queued
        self._requests: dict[Request, None] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def discard(self, request: Request) -> None:
        self._requests.pop(request, None)

    def youngest(self) -> Request | None:
        """Whoever is to yield next."""
        return max(self._requests, key=self._place, default=None)

    def youngest_behind(self, request: Request) -> Request | None:
        """The same, if it stands behind `request` in the queue."""
        holder = self.youngest()
        return holder if holder is not None and self._place(holder) > self._place(request) else None

    def _place(self, request: Request) -> tuple[bool, bool, float]:
        return not self._is_queued(request), not request.is_urgent, request.arrival
