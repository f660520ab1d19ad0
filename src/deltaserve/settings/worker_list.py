"""Lists of workers, as --workers, --workers-file and the admin routes take them: `role@host:port`, or, for a worker
that has a name of its own, `name=role@host:port`."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from deltaserve.core.ids import Role

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*\.?"
_LONGEST_HOST = 253
_PLACE = f"(?:prefill|decode)@{_HOST}:[0-9]{{1,5}}"
WORKER_PATTERN = f"(?:{_NAME}=)?{_PLACE}"
SERVICE_PATTERN = _PLACE
NAME_PATTERN = _NAME
_ENTRY = re.compile(rf"(?:({_NAME})=)?(prefill|decode)@({_HOST}):([0-9]{{1,5}})")
_HIGHEST_PORT = 65535


class WorkerEntry(NamedTuple):
    """One worker of a list."""

    name: str
    """As the worker calls itself: what it was started with as --worker-name, else its role and address."""
    role: Role
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where its links are dialled."""
        return f"tcp://{self.address}"

    def at(self, host: str) -> "WorkerEntry":
        """The worker of that role and port on one of the addresses behind a service's name."""
        return WorkerEntry(name_of(self.role, f"{host}:{self.port}"), self.role, host, self.port)


def name_of(role: Role, address: str) -> str:
    """What a worker is called that was given no name: unique, and the same on both sides."""
    return f"{role.value}-{address}"


def is_host(text: str) -> bool:
    """Whether it is an IPv4 address, or what a name server may be asked for."""
    return len(text) <= _LONGEST_HOST and re.fullmatch(_HOST, text) is not None


def parse_worker(text: str) -> WorkerEntry:
    """Raises ValueError, which says what is expected."""
    match = _ENTRY.fullmatch(text)
    if match is None or not is_host(match[3]):
        raise ValueError(f"{text[:80]!r} is no worker such as prefill@10.0.0.1:8998 or name=decode@host:8998")
    name, role, host, port = match.groups()
    if not 1 <= int(port) <= _HIGHEST_PORT:
        raise ValueError(f"{host}:{port}: port must be from 1 to {_HIGHEST_PORT}")
    return WorkerEntry(name or name_of(Role(role), f"{host}:{int(port)}"), Role(role), host, int(port))


def parse_workers(text: str) -> tuple[WorkerEntry, ...]:
    """Entries of a list with commas, or of a file with one in a line; what follows a # is a comment.

    Raises ValueError for an entry that is none, and for two of one name or address.
    """
    entries = tuple(parse_worker(entry) for line in text.splitlines() for entry in _entries(line))
    for words in ([entry.name for entry in entries], [entry.address for entry in entries]):
        for word, count in Counter(words).items():
            if count > 1:
                raise ValueError(f"{word}: listed twice")
    return entries


def _entries(line: str) -> Iterator[str]:
    for entry in line.partition("#")[0].split(","):
        if entry.strip():
            yield entry.strip()
