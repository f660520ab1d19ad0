"""What this user and this process may have beside memory: addresses (`ulimit -v`) and threads (`ulimit -u`, pids.max).

Both are met by libraries that end the process without a word of use, so they are looked at before one is started.
"""

import resource
import threading

from deltaserve.core.errors import ConfigError
from deltaserve.core.sizes import size

_ADDRESSES_BESIDE_PAGES = 2 << 30
"""What a worker maps: torch's libraries (some 400 MiB), and for each thread its stack and an arena of the C library."""
_FILES_OF_A_WORKER = 64
"""With links to a front and a peer it has some 36; twice as many links while the next ones replace them."""
_THREADS_OF_A_PROCESS = 8
"""Beside those that compute: its loop, its links' own, its watchdog, steps, transfers, and those of libraries."""


def page_addresses() -> int | None:
    """Bytes of pages that the address space of one worker has room for; None: it has no limit. Raises ConfigError.

    The pages of a peer whose memory is read are mapped as well: half is for them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    if limit <= _ADDRESSES_BESIDE_PAGES:
        raise ConfigError(
            f"a process may have {size(limit)} of addresses (ulimit -v), and a worker needs "
            f"{size(_ADDRESSES_BESIDE_PAGES)} beside its pages: raise it, or `ulimit -v unlimited`"
        )
    return (limit - _ADDRESSES_BESIDE_PAGES) // 2


def require_files() -> None:
    """Raise the soft limit on open files where a worker could not start with it. Raises ConfigError where the hard one
    is as low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FILES_OF_A_WORKER:
        raise ConfigError(
            f"this process may open {hard} files, too few for a worker: raise its hard limit (ulimit -Hn) to "
            f"{_FILES_OF_A_WORKER} or more, and to 8 for each peer beside them"
        )
    if soft != resource.RLIM_INFINITY and soft < _FILES_OF_A_WORKER:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1024, hard))


def require_threads(num_processes: int, num_computing: int) -> None:
    """Raises ConfigError where these processes could not have their threads: as many are started here, and ended."""
    count = num_processes * _THREADS_OF_A_PROCESS + num_computing
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise ConfigError(
            f"{num_processes} process(es) need some {count} threads, and {len(started)} could be started: raise what "
            "this user may have (ulimit -u), or the container (its limit on pids), or take fewer workers"
        ) from None
    finally:
        over.set()
        for thread in started:
            thread.join()
