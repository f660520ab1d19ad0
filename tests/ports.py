"""Ports: free ones, and ports that somebody else has."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from deltaserve.launch import compose

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def free_port() -> int:
    """As `compose.free_port`, of those that fall to this process."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As `compose.free_ports`, but two test processes never choose the same before one of them listens there."""
    found: list[int] = []
    while len(found) < count:
        port = compose.free_port()
        if port // 2 % _NUM_WORKERS == _WORKER and port not in found:
            found.append(port)
    return found


@contextmanager
def taken(port: int) -> Iterator[None]:
    """By somebody else, while it lasts."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last owner may linger
        other.bind(("127.0.0.1", port))
        other.listen()
        yield
