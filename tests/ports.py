"""Ports for servers that tests start, and ports that somebody else has."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def two_free_ports() -> int:
    """The lower of two free neighbours, from below the range that the kernel draws other tests' ports from."""
    for port in random.Random().sample(range(20_000, 32_000, 2), 100):
        with suppress(OSError), socket.socket() as lower, socket.socket() as upper:
            lower.bind(("127.0.0.1", port))
            upper.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports beside each other")


@contextmanager
def taken(port: int) -> Iterator[None]:
    """By somebody else, while it lasts."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last owner may linger
        other.bind(("127.0.0.1", port))
        other.listen()
        yield
