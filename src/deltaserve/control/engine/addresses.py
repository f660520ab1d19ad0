"""Where peers were said to listen: whom we dial, and at which of several addresses."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from deltaserve.control.peer.table import Peer
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import PeerAddress

_MAX_PLACES = 4
"""Most addresses that are kept for one peer."""
_PLACE_S = 5.0
"""A peer that is not there is looked for at each of its addresses for so long."""


@dataclass(slots=True)
class _Places:
    """The addresses of a peer that we heard of; the first one is dialled."""

    known: list[PeerAddress] = field(default_factory=list)
    since: float = 0.0
    """When the first one was dialled, or the peer was last there."""
    has_news: bool = False
    """The second one was heard of later than the first."""

    def remember(self, address: PeerAddress) -> None:
        """Remember an address to be tried as soon as the peer is not where it was."""
        others = [place for place in self.known[1:] if place != address]
        self.known[1:] = [address, *others][: _MAX_PLACES - 1]
        self.has_news = True

    def put_first(self, address: PeerAddress, now: float) -> None:
        others = [place for place in self.known if place != address]
        self.known, self.since, self.has_news = [address, *others][:_MAX_PLACES], now, False

    def next(self, now: float) -> PeerAddress | None:
        """Another one to dial, when there is one and the first was tried for long enough."""
        if len(self.known) < 2 or (now - self.since < _PLACE_S and not self.has_news):
            return None
        self.known, self.since, self.has_news = [*self.known[1:], self.known[0]], now, False
        return self.known[0]


class Addresses:
    """Addresses of all peers that we dial. Another one ends no link that is up, and may be one of long ago: it is
    remembered, and tried in its turn."""

    def __init__(self) -> None:
        self._places: dict[PeerName, _Places] = {}

    def __contains__(self, name: PeerName) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[PeerName]:
        return iter(self._places)

    def is_news(self, address: PeerAddress, is_up: bool, now: float) -> bool:
        """Whether a peer is to be dialled at an address that we heard of. `is_up`: its link is."""
        places = self._places.setdefault(PeerName(address.name), _Places())
        if places.known[:1] == [address]:
            return False
        if is_up and places.known:
            places.remember(address)
            return False
        places.put_first(address, now)
        return True

    def elsewhere(self, peer: Peer, now: float) -> PeerAddress | None:
        """Another address to dial, for a peer that does not answer where it was looked for."""
        places = self._places.get(peer.name)
        if places is None:
            return None
        if peer.is_ready:
            places.since = now
            return None
        return places.next(now)

    def drop(self, name: PeerName) -> bool:
        """Dial the peer no more; whether it was dialled."""
        return self._places.pop(name, None) is not None
