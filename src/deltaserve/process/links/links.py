"""All worker links of one process: frames in, frames out, by peer name.

Called from one thread. Nothing blocks but `wait`, and no bytes from a peer raise: what cannot be read, sent or dialled
is counted, logged at a bounded rate, and dropped.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import zmq

from deltaserve.core.errors import ConfigError, ProtocolError
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.codec import decode, encode
from deltaserve.core.wire.messages import Envelope, PeerAddress
from deltaserve.process.links.ends import Change, Context, Dialer, Listener, SendOutcome, Socket, receive_parts
from deltaserve.process.links.limits import LinkLimits, LinkStats
from deltaserve.process.links.name_contexts import NameContexts, host_name, look_up
from deltaserve.process.links.rare_log import RareLog
from deltaserve.process.links.security import LinkSecurity
from deltaserve.process.links.strikes import LinkKey, Strikes

_LOG_EVERY_S = 5.0
_REFUSED_OFTEN = 3
"""Handshakes in a row: a peer that is being started or killed ends one."""
_DEFAULT_LIMITS = LinkLimits()
_ROUTES_OF_A_NAME = 2
"""Connections remembered: a process that dials anew is heard over the former one for a moment longer."""
_SOCKETS_OF_A_PEER = 3
"""ZeroMQ sockets per peer: its own, and two through which its monitor speaks."""
_SOCKETS_OF_A_PROCESS = 16
"""The listener's, the authenticator's, and those that are being closed."""


class Links:
    """One optional listener and any number of dialled peers.

    A frame to a peer leaves over the connection dialled to it, else over the connection its name was last seen on.
    """

    def __init__(
        self,
        security: LinkSecurity | None = None,
        limits: LinkLimits = _DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = LinkStats()
        self._security = security
        self._limits = limits
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_OF_A_PEER * limits.max_names + _SOCKETS_OF_A_PROCESS)
        self._authenticator = security.authenticate(self._context) if security is not None else None
        self._listener: Listener | None = None
        self._clock = clock
        self._dialled: dict[PeerName, Dialer] = {}
        self._dialled_at: dict[PeerName, float] = {}
        self._names: dict[Socket, PeerName] = {}
        """Socket of a dialled peer |-> its name."""
        self._routes: OrderedDict[PeerName, tuple[bytes, ...]] = OrderedDict()  # the connection heard last comes first
        """Name |-> the listener's connection it was last seen on."""
        self._strikes = Strikes(limits.max_names, clock)
        self._log = RareLog(logging.getLogger(__name__), clock, _LOG_EVERY_S)
        self._refused: Counter[PeerName] = Counter()
        """Handshakes in a row that ended before a dialled peer was there, over redials too."""
        self._refused_at: dict[PeerName, float] = {}
        """When each dialled connection was refused of which nothing was heard since."""
        self._complaints: dict[PeerName, str] = {}
        self._name_contexts = NameContexts()
        self._lookups: dict[PeerName, Future[str | None]] = {}
        """Lookups of host names of which nothing was told yet."""
        self._poller = zmq.Poller()
        self._polled: list[Socket | int] = []
        """What `_poller` looks at."""

    # ------------------------------------------------------------ connections

    def listen(self, host: str, port: int) -> int:
        """Accept links on (host, port); returns the port bound (0 takes any). Raises ConfigError."""
        if self._listener is not None:
            raise ValueError(f"already listening on {self._listener.url}")
        self._listener = Listener(self._context, (host, port), self._limits, self._security)
        return self._listener.port

    @property
    def port(self) -> int:
        """Port of the listener. Raises ValueError when there is none."""
        if self._listener is None:
            raise ValueError("not listening")
        return self._listener.port

    def dial(self, address: PeerAddress) -> None:
        """Keep a connection to a peer's listener. Idempotent; another url for the same name replaces it."""
        name = PeerName(address.name)
        known = self._dialled.get(name)
        if known is not None and known.url == address.url:
            return
        if self._connect(name, address.url) is not None and known is not None:
            self._refused.pop(name, None)

    def _connect(self, name: PeerName, url: str) -> Dialer | None:
        """A new connection in place of the one that there is. None: none could be made, and that one stays."""
        host = host_name(url)
        context = self._context if host is None else self._name_contexts.take()
        try:
            dialer = Dialer(context, url, self._limits, self._security)
        except ConfigError as error:
            if host is not None:
                self._name_contexts.give_back(context)
            self.stats.refused_dials += 1
            self._log.warn(f"peer {name}: {error}")
            return None
        self._close_dialled(name)
        self._dialled[name] = dialer
        self._dialled_at[name] = self._clock()
        self._names[dialer.socket] = name
        if host is not None:
            self._lookups[name] = look_up(host)
        return dialer

    def hang_up(self, peer: PeerName) -> None:
        """Forget how to reach `peer`. Frames already accepted still leave within half a second."""
        self._close_dialled(peer)
        self._refused.pop(peer, None)
        self._complaints.pop(peer, None)
        self._routes.pop(peer, None)

    def _close_dialled(self, peer: PeerName) -> None:
        dialer = self._dialled.pop(peer, None)
        if dialer is not None:
            del self._names[dialer.socket], self._dialled_at[peer]
            self._refused_at.pop(peer, None)
            self._lookups.pop(peer, None)
            self._strikes.forget(peer)
            dialer.close()
            if dialer.context is not self._context:
                self._name_contexts.give_back(dialer.context)

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; waits at most `linger_ms` for accepted frames to leave."""
        if self._authenticator is not None:
            self._authenticator.stop()
        for dialer in self._dialled.values():
            dialer.close(linger_ms)
        if self._listener is not None:
            self._listener.close(linger_ms)
        self._dialled.clear()
        self._names.clear()
        self._name_contexts.close(linger_ms)
        self._listener = None
        self._context.destroy(linger=linger_ms)

    # ------------------------------------------------------------ frames

    def sockets(self) -> list[Socket]:
        """What to poll for reading; changes with `listen`, `dial`, `hang_up`, and with a `send` that dials again."""
        listening = [self._listener.socket] if self._listener is not None else []
        return listening + list(self._names)

    def monitors(self) -> list[Socket]:
        """Readable when `take_broken` has something to tell. They change as `sockets` does."""
        return [dialer.monitor for dialer in self._dialled.values()]

    def take_broken(self) -> list[PeerName]:
        """Dialled peers whose connection ended since this was last asked: they are dialled again, and may be gone.

        One that ends handshake after handshake is logged.
        """
        self._tell_unresolved()
        changes = {name: dialer.take_changes() for name, dialer in self._dialled.items()}
        for name, of_one in changes.items():
            for change in of_one:
                self._count_refusal(name, change)
        return [name for name, of_one in changes.items() if {Change.DOWN, Change.REFUSED} & set(of_one)]

    def _tell_unresolved(self) -> None:
        """Say of whose names nothing is known. They are looked up again at each try to connect."""
        for name in [name for name, lookup in self._lookups.items() if lookup.done()]:
            problem = self._lookups.pop(name).result()
            if problem is not None:
                self._complaints[name] = f"{host_name(self._dialled[name].url)} cannot be resolved: {problem}"
                self._log.warn(f"{name}: {self._complaints[name]}")

    def _count_refusal(self, peer: PeerName, change: Change) -> None:
        if change is not Change.REFUSED:
            self._refused.pop(peer, None)
            self._refused_at.pop(peer, None)
            return
        self._refused[peer] += 1
        self._refused_at[peer] = self._clock()
        if self._refused[peer] == _REFUSED_OFTEN:
            self._complaints[peer] = (
                f"what listens at {self._dialled[peer].url} ends every handshake: another cluster key there, or none, "
                "or no worker, or it hangs"
            )
            logging.getLogger(__name__).warning("%s: %s", peer, self._complaints[peer])

    @property
    def complaints(self) -> Mapping[PeerName, str]:
        """What is wrong with peers that were dialled and have not said a word under their names since."""
        return self._complaints

    def wait(self, timeout_s: float, fds: Sequence[int] = ()) -> list[Socket]:
        """Block until a socket, a monitor or one of the file descriptors is readable, or the time is over.

        Returns the readable sockets.
        """
        sockets = self.sockets()
        sources: list[Socket | int] = [*sockets, *self.monitors(), *fds]
        if sources != self._polled:
            self._poller, self._polled = zmq.Poller(), sources
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
        ready = {source for source, _ in self._poller.poll(max(0, round(timeout_s * 1000 + 0.5)))}
        return [socket for socket in sockets if socket in ready]

    def receive(self, socket: Socket) -> list[Envelope]:
        """Frames that are there now, a bounded number. Call again while the socket polls readable."""
        envelopes = []
        for parts in receive_parts(socket, self._limits.frames_per_turn):
            key: LinkKey = self._names[socket] if socket in self._names else parts[0]
            payload = parts if socket in self._names else parts[1:]
            if self._strikes.is_ignored(key):
                self.stats.ignored += 1
                continue
            try:
                envelope = _read(payload)
                self._note_source(key, PeerName(envelope.src))
            except ProtocolError as error:
                self._strike(key, error)
                continue
            self.stats.received += 1
            if isinstance(key, str):
                self._complaints.pop(PeerName(key), None)
            envelopes.append(envelope)
        return envelopes

    def send(self, peer: PeerName, envelope: Envelope) -> bool:
        """Hand a frame over, or drop and count it: no link, a full outbox, a message beyond its size limit."""
        try:
            frame = encode(envelope)
        except ProtocolError as error:
            self.stats.dropped_oversize += 1
            self._log.warn(f"to {peer}: {error}")
            return False
        sent = self._hand_over(peer, frame)
        if sent is SendOutcome.ACCEPTED:
            self.stats.sent += 1
        elif sent is SendOutcome.NO_LINK:
            self.stats.dropped_no_link += 1
        else:
            self.stats.dropped_full += 1
        return sent is SendOutcome.ACCEPTED

    def _hand_over(self, peer: PeerName, frame: bytes) -> SendOutcome:
        dialer = self._dialled.get(peer)
        if dialer is not None:
            sent = SendOutcome.STUCK if self._is_forsaken(peer) else dialer.send(frame)
            return self._redial(peer, dialer.url, frame) if sent is SendOutcome.STUCK else sent
        if self._listener is None:
            return SendOutcome.NO_LINK
        for connection in self._routes.get(peer, ()):
            sent = self._listener.send(connection, frame)
            if sent is not SendOutcome.NO_LINK:
                return sent
        self._routes.pop(peer, None)
        return SendOutcome.NO_LINK

    def _is_forsaken(self, peer: PeerName) -> bool:
        """Whether a connection was refused and longer ago than ZeroMQ would take to be refused again, or let in.

        A connection that is refused before `zmq_connect` returns can be lost in libzmq 4.3.5: the end of its session
        is told to the socket before its begin, so it is never tried again, while the socket takes frames for it.
        """
        refused_at = self._refused_at.get(peer)
        return refused_at is not None and self._clock() - refused_at >= self._limits.silence_s

    def _redial(self, peer: PeerName, url: str, frame: bytes) -> SendOutcome:
        """Give a connection up that leads nowhere, and its frames with it; not more often than every `redial_s`."""
        if self._clock() - self._dialled_at[peer] < self._limits.redial_s:
            return SendOutcome.STUCK
        self._dialled_at[peer] = self._clock()
        dialer = self._connect(peer, url)
        if dialer is None:  # for want of descriptors, say: the next frames try again
            return SendOutcome.STUCK
        self.stats.redialled += 1
        self._log.warn(f"the link to {peer} leads nowhere: dialled again")
        return dialer.send(frame)

    def _note_source(self, key: LinkKey, name: PeerName) -> None:
        """Remember where a name was seen. A dialled link carries the frames of the dialled peer only."""
        if isinstance(key, str):
            if key != name:
                hint = "name it so in --workers, or start it with --advertise"
                self._complaints[PeerName(key)] = f"it calls itself {name[:80]!r}: {hint}"
                raise ProtocolError(f"the peer dialled as {key} calls itself {name[:80]!r}: {hint}")
            return
        others = (known for known in self._routes.get(name, ()) if known != key)
        self._routes[name] = (key, *others)[:_ROUTES_OF_A_NAME]
        self._routes.move_to_end(name)
        if len(self._routes) > self._limits.max_names:
            self._routes.popitem(last=False)

    def _strike(self, key: LinkKey, error: ProtocolError) -> None:
        self.stats.malformed += 1
        who = key if isinstance(key, str) else f"connection {key.hex()}"
        ignored = self._strikes.add(key)
        self._log.warn(f"frame from {who} refused: {error}" + ("; link ignored for a while" if ignored else ""))


def _read(payload: list[bytes]) -> Envelope:
    if len(payload) != 1:
        raise ProtocolError(f"{len(payload)} parts in a message of one")
    return decode(payload[0])
