"""I28: an attempt's number stands for one try. What bears it is one prompt for one prefill worker, and numbers rise.

So whatever comes late of a former try of a room (a Starting, a Failed, the prompt that prefill still holds) is known by
its number.
"""

from dataclasses import dataclass, field

from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Offer


@dataclass(slots=True)
class Attempts:
    """All that one engine has offered."""

    _latest: dict[bytes, tuple[int, PeerName, bytes]] = field(default_factory=dict)
    """Room |-> attempt, prefill worker, prompt."""

    def offered(self, offer: Offer, to: PeerName) -> None:
        this = offer.attempt, to, offer.prompt
        former = self._latest.get(offer.room)
        if former is not None and this != former and offer.attempt <= former[0]:
            raise IntegrityError(f"I28: attempt {offer.attempt} after attempt {former[0]}, to {to} after {former[1]}")
        self._latest[offer.room] = this
