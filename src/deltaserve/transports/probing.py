"""What the checks of transports share: a block of bytes that one side gives the other, and how long that may take."""

import time
from collections.abc import Callable

from deltaserve.core.ids import RegionId

NUM_BYTES = 1 << 20
REGION = RegionId(0)
_LIMIT_S = 30.0
_POLL_S = 0.001


def poll(is_done: Callable[[], bool]) -> None:
    """Ask until it is so. Raises TimeoutError."""
    deadline = time.monotonic() + _LIMIT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing arrived within {_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
