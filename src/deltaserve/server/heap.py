"""What the front's heap keeps of large bodies: nothing that it can give back."""

import ctypes
import logging

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's mallopt(3)."""
_LARGE_BYTES = 1 << 20
_NUM_ARENAS = 2
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
        (_M_MMAP_THRESHOLD, _LARGE_BYTES),
        (_M_TRIM_THRESHOLD, _LARGE_BYTES),
        (_M_ARENA_MAX, _NUM_ARENAS),
    ):
        mallopt(option, value)
