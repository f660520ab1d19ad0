"""Ports that somebody else has."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def taken(port: int) -> Iterator[None]:
    """By somebody else, while it lasts."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last owner may linger
        other.bind(("127.0.0.1", port))
        other.listen()
        yield
