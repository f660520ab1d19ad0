"""Notifications between engine processes: a TCP connection of our own, from the writer's engine to the reader's.

Whoever connects shows two secrets that only the two workers were told: the reader's token, and its own, by which the
reader knows which rank of its peer it hears. What is heard is acknowledged, so that a writer knows that it was.
"""

import hmac
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from deltaserve.core.transport import MAX_NOTIFICATION_BYTES
from deltaserve.transports.mooncake.frames import TOKEN_BYTES, FarEngine, FrameBuffer, framed

_HELLO = b"DSN1"
_HELLO_BYTES = len(_HELLO) + 2 * TOKEN_BYTES
_ACKNOWLEDGED = b"\x06"
_MAX_STRANGERS = 64
"""Connections that have not shown the secrets; one more, and the oldest is closed."""
_RECEIVE_BYTES = 1 << 16
_CONNECT_LIMIT_S = 5.0


class NoticeSender:
    """Tells one rank of the peer. Used by one thread; may wait as long as the reader takes."""

    def __init__(self, own_token: bytes, far: FarEngine) -> None:
        self._hello = _HELLO + far.token + own_token
        self._address = (far.host, far.notice_port)
        self._connection: socket.socket | None = None

    def tell(self, data: bytes) -> None:
        """Returns when the reader has it. Raises OSError; the next call begins anew."""
        try:
            connection = self._connection or self._connect()
            connection.sendall(framed(data))
            if connection.recv(len(_ACKNOWLEDGED)) != _ACKNOWLEDGED:
                raise ConnectionError("the reader closed the connection")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        self._connection = socket.create_connection(self._address, _CONNECT_LIMIT_S)
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(self._hello)
        return self._connection


class _Guest:
    """A connection that was accepted, until and after its rank is known."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello = b""
        self.frames = FrameBuffer(MAX_NOTIFICATION_BYTES)
        self.rank: int | None = None

    @property
    def has_introduced_itself(self) -> bool:
        return len(self.hello) == _HELLO_BYTES


class NoticeReader:
    """Hears all ranks of the peer. Nothing is taken from a connection before it is known which rank it is."""

    def __init__(self, host: str, own_token: bytes, hear: Callable[[int, bytes], None]) -> None:
        self._own_token = own_token
        self._hear = hear
        self._tokens: tuple[bytes, ...] = ()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._selector: selectors.BaseSelector | None = None
        self._strangers: deque[_Guest] = deque()
        """Connections in order of arrival that have not told their rank, or whose rank cannot be known before
        `attach`."""

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def join(self, selector: selectors.BaseSelector) -> None:
        """Be driven by a loop that calls what is registered as data."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def attach(self, ranks: Sequence[FarEngine]) -> None:
        self._tokens = tuple(rank.token for rank in ranks)
        for guest in list(self._strangers):
            if guest.has_introduced_itself:
                self._recognise(guest)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = _Guest(connection)
        self._strangers.append(guest)
        self._watch(guest, lambda: self._greet(guest))
        if len(self._strangers) > _MAX_STRANGERS:
            self._dismiss(self._strangers[0])

    def _greet(self, guest: _Guest) -> None:
        """Read who it is, and no further."""
        data = self._read(guest, _HELLO_BYTES - len(guest.hello))
        guest.hello += data
        if guest.has_introduced_itself:
            if not hmac.compare_digest(guest.hello[:-TOKEN_BYTES], _HELLO + self._own_token):
                self._dismiss(guest)
                return
            self._unwatch(guest)
            if self._tokens:
                self._recognise(guest)

    def _recognise(self, guest: _Guest) -> None:
        shown = guest.hello[-TOKEN_BYTES:]
        ranks = [rank for rank, token in enumerate(self._tokens) if hmac.compare_digest(token, shown)]
        if not ranks:
            self._dismiss(guest)
            return
        guest.rank = ranks[0]
        self._strangers.remove(guest)
        self._watch(guest, lambda: self._listen(guest))

    def _listen(self, guest: _Guest) -> None:
        assert guest.rank is not None
        try:
            messages = guest.frames.feed(self._read(guest, _RECEIVE_BYTES))
        except ValueError:
            self._dismiss(guest)
            return
        for message in messages:
            self._hear(guest.rank, message)
            with suppress(OSError):  # a writer that is gone
                guest.connection.send(_ACKNOWLEDGED)

    def _read(self, guest: _Guest, num_bytes: int) -> bytes:
        """Empty when there is nothing; a connection that has ended is closed."""
        try:
            data = guest.connection.recv(num_bytes)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._dismiss(guest)
        return data

    def _dismiss(self, guest: _Guest) -> None:
        self._unwatch(guest)
        if guest in self._strangers:
            self._strangers.remove(guest)
        guest.connection.close()

    def _watch(self, guest: _Guest, on_readable: Callable[[], None]) -> None:
        assert self._selector is not None
        self._selector.register(guest.connection, selectors.EVENT_READ, on_readable)

    def _unwatch(self, guest: _Guest) -> None:
        assert self._selector is not None
        with suppress(KeyError, ValueError):  # an introduced one is not watched while nobody is attached
            self._selector.unregister(guest.connection)


def new_token() -> bytes:
    return os.urandom(TOKEN_BYTES)
