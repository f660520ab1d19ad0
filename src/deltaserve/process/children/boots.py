"""The number of this process start: later starts of a process have higher ones."""

import secrets
import time

from deltaserve.core.ids import Boot

_RANDOM_BITS = 12
"""Below the microseconds: two processes that start at once under one name still differ."""


def new_boot(former: int) -> Boot:
    """A boot by the wall clock, above `former` (the start before this one, where somebody knows it; else 0).

    A clock may be set back between two starts. Who restarts a process tells it its former number; for a process that
    was started by hand the others wait until the former one has been silent for long (peer.table).
    """
    microseconds = time.time_ns() // 1000
    return Boot(max(former + 1, (microseconds << _RANDOM_BITS) + secrets.randbits(_RANDOM_BITS)))
