"""This side's transport endpoints for its peers: those that are being opened, and fences under way."""

from dataclasses import dataclass

from deltaserve.control.engine.own_hello import digest
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.transfer.commands import FencePeer, OpenEndpoint
from deltaserve.core.ids import PeerName
from deltaserve.core.layout.spec import PageTerms
from deltaserve.core.wire.messages import Hello, RankEnd


@dataclass(slots=True)
class Greeting:
    """An endpoint being opened for a peer, and what we know of theirs."""

    number: int
    ours: tuple[RankEnd, ...] = ()
    """The ends of our ranks; none before they are open."""
    theirs: Hello | None = None

    def is_answered_by(self, hello: Hello) -> bool:
        """Whether the Hello answers the one that told of our ends."""
        return bool(self.ours) and hello.answers == digest(self.ours)

    def has_ends_of(self, hello: Hello) -> bool:
        return self.theirs is not None and self.theirs.ends == hello.ends


class PeerEndpoints:
    """Numbers of handshakes: what is reported of an earlier one does not count."""

    def __init__(self) -> None:
        self.greetings: dict[PeerName, Greeting] = {}
        self._num_greetings = 0
        self._num_fencing = 0
        """Fences that were asked for and are not there yet."""

    @property
    def is_fencing(self) -> bool:
        """Whether the transfer thread waits for a fence, and hears nothing else meanwhile. Reports come in order: when
        every endpoint was ended, nothing that was commanded is still to be reported on when this ends.
        """
        return self._num_fencing > 0

    def open(
        self, name: PeerName, turn: EngineTurn, theirs: Hello | None = None, terms: PageTerms | None = None
    ) -> None:
        """Begin a handshake; with `theirs` the endpoint is attached at once."""
        self._num_greetings += 1
        self.greetings[name] = Greeting(self._num_greetings, theirs=theirs)
        turn.do(OpenEndpoint(name, self._num_greetings, None if theirs is None else theirs.ends, terms))

    def end(self, name: PeerName, turn: EngineTurn) -> None:
        """End the peer's endpoint, also one that is being opened."""
        self.greetings.pop(name, None)
        self._num_fencing += 1
        turn.do(FencePeer(name))

    def on_fenced(self) -> None:
        """The transfer thread is done with a FencePeer."""
        self._num_fencing -= 1
