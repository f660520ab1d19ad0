"""What the front's heap keeps of large bodies: nothing that it can give back."""

import asyncio
import contextlib
import ctypes
import logging

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Numbers of glibc's parameters, see mallopt(3)."""
LARGE_BYTES = 1 << 20
_NUM_ARENAS = 2
_SOON_S = 1.0
_log = logging.getLogger("deltaserve.server")


def return_large_blocks() -> None:
    """Have blocks of a megabyte and more come from the kernel and go back to it, whoever held them.

    glibc raises that size to the largest block that was ever freed, up to 32 MB: behind the first large body others
    are cut from heaps, one for each of the threads that read bodies, and small blocks between them keep those heaps
    whole. Where the C library has no mallopt nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        _log.info("no mallopt here: memory of large bodies may be kept")
        return
    for option, value in (
        (_M_MMAP_THRESHOLD, LARGE_BYTES),
        (_M_TRIM_THRESHOLD, LARGE_BYTES),
        (_M_ARENA_MAX, _NUM_ARENAS),
    ):
        mallopt(option, value)


class HeapTrim:
    """Gives back free pages that lie between others in glibc's heap, soon after a large body is done with: what it was
    read to is mostly smaller than the blocks that go back by themselves. At most once a second; it takes milliseconds.

    Python's own blocks, of up to 512 bytes, lie in arenas of a mebibyte, which go back when all of one is free: a
    single block that was made meanwhile and stays keeps one. So a front keeps some tens of megabytes of them.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
