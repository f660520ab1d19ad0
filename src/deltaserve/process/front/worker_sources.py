"""Where a running front learns which workers there are: a file that is looked at, names that are looked up.

A file that cannot be read or parsed, and a name that cannot be resolved, change nothing: what was known last counts on,
and the log says so once. A name that resolves to no address at all is taken for a failure as well: a service without
any ready worker, and a name server that has just lost it, look the same.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltaserve.core.errors import one_line
from deltaserve.process.children.own_thread import in_own_thread
from deltaserve.settings.worker_list import WorkerEntry, parse_workers

_log = logging.getLogger(__name__)
_MOST_FILE_BYTES = 1 << 20
FILE_EVERY_S = 1.0
NAMES_EVERY_S = 5.0

_IPV4: dict[str, Any] = {"family": socket.AF_INET, "type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}

Listener = Callable[[str, Sequence[WorkerEntry]], None]
"""Gets the source, for people, and all workers that it names now."""


def words_of(error: OSError | ValueError) -> str:
    """What is wrong with a list or a name, for people."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _Complaints:
    """Says what is wrong once, and when it is over."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._last: str | None = None

    def tell(self, problem: str | None, unforeseen: Exception | None = None) -> None:
        if problem != self._last:
            if problem is not None:
                _log.warning("%s: %s; what it said last counts on", self._source, problem, exc_info=unforeseen)
            else:
                _log.info("%s: readable again", self._source)
            self._last = problem


async def watch_file(path: Path, listener: Listener, every_s: float = FILE_EVERY_S) -> None:
    """Until cancelled. A file that does not exist yet may come; one that is replaced as a whole, as editors and config
    maps do, is read as it is then."""
    await _watch(f"--workers-file {path}", lambda: read_list(path), listener, every_s)


async def watch_name(service: WorkerEntry, listener: Listener, every_s: float = NAMES_EVERY_S) -> None:
    """Until cancelled. Each IPv4 address behind the name is a worker of that role and port, called by its address:
    start it with --advertise and that address."""
    await _watch(f"--workers-dns {service.role.value}@{service.address}", lambda: look_up(service), listener, every_s)


async def _watch(source: str, look: Callable[[], tuple[WorkerEntry, ...]], listener: Listener, every_s: float) -> None:
    """`look`: who is named now, which may take any time. Raises OSError, ValueError: what was known last counts on."""
    complaints, last = _Complaints(source), None
    while True:
        try:
            entries = await asyncio.wrap_future(in_own_thread(source[:40], look))
            if entries != last:
                listener(source, entries)
                last = entries
        except (OSError, ValueError) as error:  # socket.gaierror is an OSError
            complaints.tell(words_of(error))
        except Exception as error:  # no thread to look with, for one; nobody else would look again
            complaints.tell(f"{type(error).__name__}: {one_line(error)}", error)
        else:
            complaints.tell(None)
        await asyncio.sleep(every_s)


def read_list(path: Path) -> tuple[WorkerEntry, ...]:
    """What the file names now. Raises OSError; ValueError where it is no list.

    One that names nobody is none: an editor that writes in place passes through it, and who wants no worker has calls.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        content = file.read(_MOST_FILE_BYTES + 1)
    if len(content) > _MOST_FILE_BYTES:
        raise ValueError(f"more than {_MOST_FILE_BYTES} bytes")
    entries = parse_workers(content.decode())
    if not entries:
        raise ValueError("names no worker")
    return entries


def look_up(service: WorkerEntry) -> tuple[WorkerEntry, ...]:
    """Who is behind the name now; it may take seconds. Raises OSError."""
    found = socket.getaddrinfo(service.host, service.port, **_IPV4)
    return tuple(service.at(host) for host in sorted({str(address[0]) for *_, address in found}))
