"""The event loop of a front: uvloop's where it is installed, which takes less of a core for each event."""

import asyncio
from collections.abc import Callable

try:
    import uvloop
except ImportError:
    uvloop = None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the loop; None: asyncio's own."""
    if uvloop is None:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make
