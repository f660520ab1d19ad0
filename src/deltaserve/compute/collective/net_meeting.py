"""Where processes on several machines meet. No torch: rank 0 listens before it loads anything."""

import socket
from dataclasses import dataclass, field

from deltaserve.core.files.private_file import MIN_KEY_BYTES

_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class NetMeeting:
    """What a rank must know to find the others. Hosts are IPv4 addresses of the trusted data network, or names."""

    host: str
    """Where rank 0 listens, and on which port."""
    port: int
    own_host: str
    """Address of this machine on which this rank listens for the others; on any port."""
    key: bytes = field(repr=False)
    """Secret of all that are to meet, and of nobody else."""

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_BYTES:
            raise ValueError(f"key of the ranks has {len(self.key)} bytes; at least {MIN_KEY_BYTES} are needed")


def listen_at(address: tuple[str, int]) -> socket.socket:
    """A listening socket at an IPv4 address, or a name, and port. Raises OSError."""
    return socket.create_server(address, family=socket.AF_INET, backlog=_BACKLOG)


def listen_for_ranks(host: str) -> socket.socket:
    """Listening socket of rank 0, on any port: it is there before the others are told where to dial. Raises OSError."""
    return listen_at((host, 0))
