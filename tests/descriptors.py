"""File descriptors of the test's process: none left, or only high ones."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def no_more_files() -> Iterator[None]:
    """Whatever opens a descriptor fails meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def only_high_files(above: int) -> Iterator[None]:
    """Whatever is opened meanwhile has a number above this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * above, hard)), hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        number = 0
        while number < above:
            number = os.dup(0)
            opened.callback(os.close, number)
        yield


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
