"""Whose bytes are parsed next: the connections of a front take turns, by what parsing costs."""

import asyncio
import logging
from typing import Protocol

TURN_EVENTS = 64
"""Events of the HTTP parser between two looks at the sockets, of all connections together. Each takes 10 to 30 us:
nobody waits longer than some milliseconds for what others have sent."""
CONNECTION_EVENTS = 16
"""Most of them of one connection, before the others have theirs."""

_log = logging.getLogger("deltaserve.server")


class Parsed(Protocol):
    """A connection that bytes have come from."""

    def parse(self, most: int) -> int:
        """Parse at most so many events; how many there were."""
        ...

    def has_more(self) -> bool:
        """Whether something is there that can be parsed now."""
        ...

    def abort(self) -> None:
        """End the connection."""
        ...


class ParseTurns:
    """The queue of those connections, in one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Parsed, None] = {}
        self._is_due = False

    def add(self, connection: Parsed) -> None:
        """Something can be parsed. A connection that waits already keeps its place."""
        self._waiting.setdefault(connection)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        num_left = TURN_EVENTS
        while self._waiting and num_left > 0:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            num_left -= self._parse(connection, min(num_left, CONNECTION_EVENTS))
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _parse(self, connection: Parsed, most: int) -> int:
        """What it cost; a connection that gave no event was looked at, too."""
        try:
            num_events = connection.parse(most)
        except Exception:
            _log.exception("a connection met a bug in the HTTP parser, and is closed")
            connection.abort()
            return most
        if connection.has_more():
            self._waiting[connection] = None
        return max(1, num_events)
