"""Where ranks on several machines find each other. No torch: rank 0 listens before it loads anything."""

import socket

_BACKLOG = 128


def listen_at(address: tuple[str, int]) -> socket.socket:
    """A listening socket at an IPv4 address, or a name, and port. Raises OSError."""
    return socket.create_server(address, family=socket.AF_INET, backlog=_BACKLOG)


def listen_for_ranks(host: str) -> socket.socket:
    """Listening socket of rank 0, on any port: it is there before the others are told where to dial. Raises OSError."""
    return listen_at((host, 0))
