"""One end of the link between two ranks of a worker: a ZeroMQ PAIR over a socket file of a private folder.

Both ends are processes of one worker on one machine. A frame arrives whole and in order or not at all. That the other
process has ended is not told here: whoever started it watches the process.
"""

import time
from pathlib import Path

import zmq

from deltaserve.control.transfer.rank_chain import RankLogError
from deltaserve.core.errors import ConfigError
from deltaserve.process.links.ends import Context, Socket

_MAX_PATH_BYTES = 100
"""A socket's address holds 107 bytes (unix(7))."""
_MAX_FRAMES = 10_000
"""Most frames that wait to be sent or taken: more mean that the other side takes none."""
_SHORTEST_POLL_S = 0.001


class RankSilent(RankLogError):
    """The other rank took or sent nothing for too long."""


class RankSockets:
    """Makes the ends of this process. One object for all: it owns the thread that does their I/O."""

    def __init__(self) -> None:
        self._context: Context = zmq.Context()

    def bind(self, path: Path) -> "RankSocket":
        """The end that is there first. Raises ConfigError."""
        if len(bytes(path)) > _MAX_PATH_BYTES:
            raise ConfigError(f"{path} is too long for the address of a socket; choose a shorter --state-dir or TMPDIR")
        socket = self._pair()
        try:
            socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{path}: no socket can be made: {error.strerror}") from None
        return RankSocket(socket)

    def connect(self, path: Path) -> "RankSocket":
        socket = self._pair()
        socket.connect(f"ipc://{path}")
        return RankSocket(socket)

    def _pair(self) -> Socket:
        socket: Socket = self._context.socket(zmq.PAIR)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            socket.set(limit, _MAX_FRAMES)
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)


class RankSocket:
    """Used by one thread at a time."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

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
