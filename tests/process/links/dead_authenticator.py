"""`python -m tests.process.links.dead_authenticator`: what checks the keys of members dies when the first one dials.

Not to come to its end: nobody can join the listener any more.
"""

import threading

from deltaserve.process.links import security
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from tests.process.links.frames import PREFILL, address


class NoMemory:
    """In place of the members."""

    def __init__(self, public: bytes) -> None:
        """Knows nobody."""

    def callback(self, domain: str, key: bytes) -> bool:
        raise MemoryError


def main() -> None:
    security._Members = NoMemory  # type: ignore[misc,assignment]
    listener, dialer = (Links(LinkSecurity.from_cluster_key(b"k" * 32)) for _ in range(2))
    dialer.dial(address(PREFILL, listener.listen("127.0.0.1", 0)))
    threading.Event().wait()


if __name__ == "__main__":
    main()
