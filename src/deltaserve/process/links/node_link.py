"""The link between the machines of one worker: node 0 listens, the others dial. Both ends prove the cluster key."""

import zmq

from deltaserve.process.links.ends import Change, Context, Dialer, Listener, SendOutcome, receive_parts
from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.security import LinkSecurity

_FRAMES_PER_TURN = 256
_LAST_FRAME_MS = 500
_LIMITS = LinkLimits(outbox_frames=64)
"""What is said while node 0 is not there is of no use to it later."""


class NodeHub:
    """Node 0's end: any number of other nodes, each known by its connection. For one thread."""

    def __init__(self, host: str, port: int, security: LinkSecurity) -> None:
        """Listens. Raises ConfigError."""
        context: Context = zmq.Context()
        self._authenticator = security.authenticate(context)
        self._listener = Listener(context, (host, port), LinkLimits(), security)
        self._poller = zmq.Poller()
        self._poller.register(self._listener.socket, zmq.POLLIN)

    def wait(self, wait_ms: int, descriptor: int) -> list[tuple[bytes, bytes]]:
        """(connection, frame) of what has come: by then, or sooner when there is something, or `descriptor` can be
        read."""
        self._poller.register(descriptor, zmq.POLLIN)
        self._poller.poll(wait_ms)
        return [(one[0], one[1]) for one in receive_parts(self._listener.socket, _FRAMES_PER_TURN) if len(one) == 2]

    def send(self, connection: bytes, frame: bytes) -> bool:
        """Whether the connection is there."""
        return self._listener.send(connection, frame) is not SendOutcome.NO_LINK


class NodeSpoke:
    """Another node's end. For one thread."""

    def __init__(self, url: str, security: LinkSecurity) -> None:
        """Dials, until somebody listens there. Raises ConfigError."""
        self._context: Context = zmq.Context()
        self._dialer = Dialer(self._context, url, _LIMITS, security)
        self._poller = zmq.Poller()
        for socket in (self._dialer.socket, self._dialer.monitor):
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, wait_ms: int, descriptor: int) -> list[bytes]:
        """Frames that have come: by then, or sooner when there is something, the connection has changed or `descriptor`
        can be read."""
        self._poller.register(descriptor, zmq.POLLIN)
        self._poller.poll(wait_ms)
        return [parts[-1] for parts in receive_parts(self._dialer.socket, _FRAMES_PER_TURN)]

    def send(self, frame: bytes) -> None:
        """Dropped where too much waits to be sent."""
        self._dialer.send(frame)

    def was_cut(self) -> bool:
        """Whether the connection has ended since this was last asked."""
        return any(change is not Change.UP for change in self._dialer.take_changes())

    def close(self) -> None:
        """Returns when what was said last has left, or half a second later."""
        self._dialer.close(_LAST_FRAME_MS)
        self._context.term()
