"""One end of the link between two ranks of a worker: over a socket file of a private folder, or TCP between machines.

A frame arrives whole and in order, or not at all: one that is lost with a connection is missed by the log that the
frames are entries of. That the other process has ended is not told here: whoever started it watches the process.
"""

import time

import zmq

from deltaserve.control.transfer.rank_chain import RankLogError
from deltaserve.core.errors import ConfigError
from deltaserve.process.links.ends import Context, Socket, new_socket
from deltaserve.process.links.security import LinkSecurity

_MAX_PATH_BYTES = 100
"""A socket's address holds 107 bytes (unix(7))."""
_MAX_FRAMES = 10_000
"""Most frames that wait to be sent or taken: more mean that the other side takes none."""
_SHORTEST_POLL_S = 0.001
_FILE = "ipc://"


class RankSilent(RankLogError):
    """The other rank took or sent nothing for too long."""


class RankSockets:
    """Makes the ends of this process. One object for all: it owns the thread that does their I/O."""

    def __init__(self, security: LinkSecurity | None = None) -> None:
        """`security`: what both ends of a link over TCP must hold."""
        self._context: Context = zmq.Context()
        self._security = security
        self._authenticator = security.authenticate(self._context) if security is not None else None

    def bind(self, url: str) -> "RankSocket":
        """The end that is there first. `url`: `ipc://PATH`, or `tcp://HOST:*`. Raises ConfigError."""
        path = url.removeprefix(_FILE)
        if url.startswith(_FILE) and len(path.encode()) > _MAX_PATH_BYTES:
            raise ConfigError(f"{path} is too long for the address of a socket; choose a shorter --state-dir or TMPDIR")
        socket = self._end()
        if self._security is not None and not url.startswith(_FILE):
            self._security.secure_listener(socket)
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{path}: no socket can be made: {error.strerror}") from None
        return RankSocket(socket)

    def connect(self, url: str) -> "RankSocket":
        socket = self._end()
        if self._security is not None and not url.startswith(_FILE):
            self._security.secure_dialer(socket)
        socket.connect(url)
        return RankSocket(socket)

    def _end(self) -> Socket:
        """DEALER: with one other end, it takes turns with nobody."""
        socket = new_socket(self._context, zmq.DEALER)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            socket.set(limit, _MAX_FRAMES)
        return socket

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)


class RankSocket:
    """Used by one thread at a time."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    @property
    def url(self) -> str:
        """Where a bound end listens."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, frame: bytes, wait_s: float) -> None:
        """Raises RankSilent when the other side has taken none of very many frames for `wait_s`."""
        if not self._socket.poll(_milliseconds(wait_s), zmq.POLLOUT):
            raise RankSilent(f"it took no frame for {wait_s:g} s")
        self._socket.send(frame)

    def receive(self, wait_s: float | None) -> bytes | None:
        """The next frame; None when none came for `wait_s`. Without a limit where nothing is owed: None."""
        if wait_s is not None and 0 < wait_s < _SHORTEST_POLL_S:  # ZeroMQ counts whole milliseconds
            time.sleep(wait_s)
            wait_s = 0.0
        if not self._socket.poll(None if wait_s is None else _milliseconds(wait_s), zmq.POLLIN):
            return None
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=0)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
