"""The links of an asyncio process (the front): the same Links, read when the event loop sees a socket move."""

import asyncio
from collections.abc import Callable

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Envelope, PeerAddress
from deltaserve.process.links.ends import Socket, descriptor, is_readable
from deltaserve.process.links.links import Links


class AsyncLinks:
    """Calls `on_envelope`, which must not raise, in the event loop for each frame. Made and used inside a running loop.

    ZeroMQ's file descriptor signals changes, not readiness: after each send the socket is looked at again.
    """

    def __init__(
        self,
        links: Links,
        on_envelope: Callable[[Envelope], None],
        on_broken: Callable[[PeerName], None] | None = None,
    ) -> None:
        """Takes over `links`, which may be listening already. `on_broken`: a dialled peer's connection ended."""
        self._links = links
        self._on_envelope = on_envelope
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._watched: dict[Socket, int] = {}
        """Socket |-> its file descriptor."""
        self._is_look_due = False
        self._watch()

    @property
    def links(self) -> Links:
        """The links, for `stats`; send and dial through this object."""
        return self._links

    def dial(self, address: PeerAddress) -> None:
        self._links.dial(address)
        self._watch()

    def hang_up(self, peer: PeerName) -> None:
        self._links.hang_up(peer)
        self._watch()

    def send(self, peer: PeerName, envelope: Envelope) -> bool:
        """Send as Links.send does: never blocks, False when dropped."""
        num_redialled = self._links.stats.redialled
        sent = self._links.send(peer, envelope)
        if self._links.stats.redialled > num_redialled:
            self._watch()
        self._look_soon()
        return sent

    def close(self, linger_ms: int = 0) -> None:
        for fd in self._watched.values():
            self._loop.remove_reader(fd)
        self._watched.clear()
        self._links.close(linger_ms)

    def _watch(self) -> None:
        """Follow the set of sockets."""
        current = {*self._links.sockets(), *self._links.monitors()}
        for socket in self._watched.keys() - current:
            self._loop.remove_reader(self._watched.pop(socket))
        for socket in current - self._watched.keys():
            self._watched[socket] = descriptor(socket)
            self._loop.add_reader(self._watched[socket], self._look)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Read every socket that has something; come back soon for what a bounded turn left."""
        self._is_look_due = False
        for socket in self._links.sockets():
            if socket not in self._watched or not is_readable(socket):
                continue
            for envelope in self._links.receive(socket):
                self._on_envelope(envelope)
        for peer in self._links.take_broken():
            if self._on_broken is not None:
                self._on_broken(peer)
        if any(is_readable(socket) for socket in self._watched):
            self._look_soon()
