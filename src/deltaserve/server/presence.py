"""Whether a client that sends nothing more waits for its answer, or has left.

Both look alike: each ends its half of the connection. What is written to one that has left is refused by its machine,
and the next write ends the connection. So something that means nothing is written until the answer is complete.
"""

import asyncio
from collections.abc import Callable

import h11

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
"""Any number of interim answers may come before an answer, and clients that asked for none ignore this one (RFC 9110,
15.2)."""
_EMPTY_LINES = h11.Data(data=b"\n\n")


def means_nothing(connection: h11.Connection, is_events: bool) -> h11.InformationalResponse | h11.Data | None:
    """What can be sent now without a change of the answer; None: nothing. `is_events`: the answer is a stream of
    server-sent events, and each was sent whole."""
    if connection.our_state is h11.SEND_RESPONSE:
        return _CONTINUE
    return _EMPTY_LINES if is_events and connection.our_state is h11.SEND_BODY else None


class PresenceTimer:
    """Calls `ask` at once, soon, then ever less often, as long as it returns True."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Nothing when it runs."""
        if self._timer is None:
            self._due()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        if self._ask():
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._due)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
