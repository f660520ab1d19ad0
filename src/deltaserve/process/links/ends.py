"""The two ends of a worker link: a listener (ROUTER) and a dialer (DEALER). Neither ever blocks."""

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from deltaserve.core.errors import ConfigError
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.outbox import TRACKED_BYTES, Outbox
from deltaserve.process.links.security import LinkSecurity

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_HANDSHAKE_MS = 5_000
_INBOX_FRAMES = 1000
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 200
"""A restarted peer is found again that soon. A try costs a packet."""
_HANG_UP_LINGER_MS = 500
_MADE_LINGER_MS = 500
_MAX_EVENTS = 100
"""Read of a monitor in a turn."""
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
"""Events of a connection that are watched, but not failed handshakes: with these, libzmq 4.3.5 aborts the process
(`!_io_error`, issue 4841 there) when bytes of a handshake were damaged on their way. tests/chaos has such links."""


class SendOutcome(Enum):
    """What became of a frame."""

    ACCEPTED = "accepted"
    FULL = "full"
    STUCK = "stuck"
    """ZeroMQ takes no frame: too many wait, or the connection broke in a way after which it does not reconnect."""
    NO_LINK = "no_link"


class Change(Enum):
    """What has become of a dialled connection."""

    UP = "up"
    DOWN = "down"
    REFUSED = "refused"
    """The connection ended before it was up: the other side closed it, or either took the other's bytes for none of a
    member."""


class Listener:
    """Accepts links on one TCP port. Replies go to a connection by the identity ZeroMQ gave it."""

    def __init__(self, context: Context, address: tuple[str, int], limits: LinkLimits, security: LinkSecurity | None):
        """Bind (host, port); port 0 takes any. Raises ConfigError when the address cannot be bound."""
        host, port = address
        self._limits = limits
        self._outboxes: OrderedDict[bytes, Outbox] = OrderedDict()
        self.socket = _open(context, zmq.ROUTER, limits)
        self.socket.router_mandatory = True
        if security is not None:
            security.secure_listener(self.socket)
        if ":" in host:
            self.socket.ipv6 = True
            host = f"[{host}]"
        try:
            self.socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise ConfigError(f"cannot listen for worker links on {host}:{port} ({error.strerror})") from None
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.url.rpartition(":")[2])

    def send(self, connection: bytes, frame: bytes) -> SendOutcome:
        outbox = self._outboxes.get(connection)
        if outbox is None:
            outbox = self._outboxes[connection] = Outbox(self._limits.outbox_bytes)
            if len(self._outboxes) > self._limits.max_names:
                self._outboxes.popitem(last=False)
        sent = _send(self.socket, [connection, frame], outbox)
        if sent is SendOutcome.NO_LINK:
            del self._outboxes[connection]
        return sent

    def close(self, linger_ms: int) -> None:
        self.socket.close(linger=linger_ms)


class Dialer:
    """One connection to a peer's listener. Reconnects by itself until closed, unless the peer's bytes made no sense.

    After those ZeroMQ drops the connection for good; all that is seen of it is that no frame can be sent.
    """

    def __init__(self, context: Context, url: str, limits: LinkLimits, security: LinkSecurity | None):
        """Raises ConfigError for a url that is not `tcp://host:port`, and when no more sockets are to be had."""
        self.url, self.context = url, context
        self._outbox = Outbox(limits.outbox_bytes)
        self._is_up = False
        if not _is_tcp(url):
            raise ConfigError(f"worker links are tcp://host:port, not {url[:80]!r}")
        try:
            self.socket = _open(context, zmq.DEALER, limits)
            self.monitor = _monitor(self.socket, _WATCHED)
            """Readable when the connection began or ended; ZeroMQ makes a new one by itself."""
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot dial {url[:80]!r} ({error.strerror})") from None
        self.socket.reconnect_ivl = _RECONNECT_MS
        self.socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        self.socket.ipv6 = "[" in url
        if security is not None:
            security.secure_dialer(self.socket)
        try:
            self.socket.connect(url)
        except zmq.ZMQError as error:
            self.close(linger_ms=0)
            raise ConfigError(f"cannot dial {url[:80]!r} ({error.strerror})") from None

    def send(self, frame: bytes) -> SendOutcome:
        return _send(self.socket, [frame], self._outbox)

    def close(self, linger_ms: int = _HANG_UP_LINGER_MS) -> None:
        """What was accepted for sending has that long to leave; this call does not wait for it."""
        _close(self.socket, self.monitor, linger_ms)

    def take_changes(self) -> list[Change]:
        """What became of the connection since this was last asked."""
        changes = []
        for event in _events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                changes.append(Change.UP)
            else:
                changes.append(Change.DOWN if self._is_up else Change.REFUSED)
            self._is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return changes


def receive_parts(socket: Socket, limit: int) -> list[list[bytes]]:
    """Messages that are there now, each as its parts; at most `limit`."""
    messages: list[list[bytes]] = []
    while len(messages) < limit:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages


def descriptor(socket: Socket) -> int:
    """The file descriptor that moves when the socket's state may have changed."""
    return int(socket.getsockopt(zmq.FD))


def is_readable(socket: Socket) -> bool:
    """Whether a message waits. Also lets ZeroMQ take note of what its descriptor signalled."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _is_tcp(url: str) -> bool:
    """ZeroMQ alone would take other transports, options and ports beyond 65535."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme == "tcp" and bool(parts.hostname) and bool(parts.port) and parts.netloc == url[len("tcp://") :]
        )
    except ValueError:
        return False


def new_socket(context: Context, kind: int) -> Socket:
    """A socket that always lets its context end. Raises ZMQError when no more are to be had.

    Connections of a listener keep the linger time that it had when it was bound, and in ZeroMQ that is without end.
    libzmq 4.3.5 then never ends a context in which a connection broke as its listener was closed, while a frame waited
    to leave over it.
    """
    socket = context.socket(kind)
    socket.linger = _MADE_LINGER_MS
    return socket


def _open(context: Context, kind: int, limits: LinkLimits) -> Socket:
    socket = new_socket(context, kind)
    socket.sndhwm = limits.outbox_frames
    socket.rcvhwm = _INBOX_FRAMES
    socket.maxmsgsize = limits.max_frame_bytes
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket


def _monitor(socket: Socket, events: int) -> Socket:
    """Tells of connections. Closes the socket it cannot watch; raises ZMQError."""
    try:
        return socket.get_monitor_socket(events)
    except zmq.ZMQError:
        socket.disable_monitor()
        socket.close(linger=0)
        raise


def _events(monitor: Socket) -> Iterator[int]:
    """What happened on a connection since the last call."""
    if is_readable(monitor):
        for parts in receive_parts(monitor, _MAX_EVENTS):
            yield parse_monitor_message(parts)["event"]


def _close(socket: Socket, monitor: Socket, linger_ms: int) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)


def _send(socket: Socket, parts: list[bytes], outbox: Outbox) -> SendOutcome:
    num_bytes = len(parts[-1])
    try:
        if num_bytes < TRACKED_BYTES:
            socket.send_multipart(parts, zmq.NOBLOCK)
            return SendOutcome.ACCEPTED
        if not outbox.admits(num_bytes):
            return SendOutcome.FULL
        tracker = socket.send_multipart(parts, zmq.NOBLOCK, copy=False, track=True)
    except zmq.Again:
        return SendOutcome.STUCK
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return SendOutcome.NO_LINK
        raise
    if tracker is not None:
        outbox.add(tracker, num_bytes)
    return SendOutcome.ACCEPTED
