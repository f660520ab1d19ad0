"""h11's HTTP/1.1 parser, with a bound on what it does at a time and on what a request may make it do."""

import re
from typing import Any

import h11

MAX_HEAD_BYTES = 32 * 1024
"""A request head that is still incomplete here is refused by the parser; smaller ones by the edge, with its limits."""
FEED_BYTES = 4 * 1024
"""Bytes that it is given at a time: a head, or trailers, are one event, however many lines they have."""
MAX_HEAD_LINES = 256
"""More lines of a head, or of trailers, are refused before they are parsed; fewer by the edge, with its limit."""
MAX_EMPTY_LINES = 8
"""Lines before a request line that are empty and ignored (RFC 9112, 2.2). Some clients send one behind a body."""
MAX_FRAMING = 4
FREE_FRAMING_BYTES = 64 * 1024
"""A body may take `MAX_FRAMING` times its own bytes on the wire and these. Chunks of one byte take six times, and each
costs as much time as one of some kilobytes."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")


class BoundedParser(h11.Connection):
    """A server's end of one connection.

    It gives as many events as it is allowed, then says that it needs data, which makes uvicorn come back later.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.num_allowed = 0
        """Events that it may still give."""
        self.is_stopped = False
        """Whether it might have given one of the bytes it has, had it been allowed to."""
        self.is_paused = False
        """Whether the next request is there, and its turn is after the answer to this one."""
        self.num_body_bytes = 0
        """Bytes of this request's body so far."""
        self._num_wire_bytes = 0
        self._num_empty_lines = 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes; what they are is told by `next_event`."""
        self._num_wire_bytes += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """h11's, or NEED_DATA where no more are allowed. Raises h11.RemoteProtocolError."""
        self.is_paused = False
        self.is_stopped = self.num_allowed <= 0 and bool(self._waiting())
        if self.is_stopped:
            return h11.NEED_DATA
        if self.their_state is h11.IDLE and not self._is_at_head():
            return h11.NEED_DATA
        self.num_allowed -= 1
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.num_body_bytes += len(event.data)
        elif isinstance(event, h11.Request):
            self.num_body_bytes, self._num_wire_bytes, self._num_empty_lines = 0, len(self._waiting()), 0
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            self._check_pending_lines()
        self.is_paused = event is h11.PAUSED
        return event

    @property
    def is_in_head(self) -> bool:
        """Whether a request head has begun and is not complete."""
        return self.their_state is h11.IDLE and bool(self._num_empty_lines or self._waiting())

    @property
    def is_mostly_framing(self) -> bool:
        """Whether a body that goes on has brought next to nothing for what it took to send."""
        bound = MAX_FRAMING * self.num_body_bytes + FREE_FRAMING_BYTES
        return self.their_state is h11.SEND_BODY and self._num_wire_bytes > bound

    @property
    def num_announced_bytes(self) -> int:
        """What the chunk being read will still bring, by its first line."""
        return getattr(self._reader, "_bytes_in_chunk", 0)

    def _waiting(self) -> bytes:
        return self.trailing_data[0]

    def _is_at_head(self) -> bool:
        """Drop empty lines; whether something else is there. Raises h11.RemoteProtocolError for too many lines."""
        waiting = self._waiting()
        while self._num_empty_lines < MAX_EMPTY_LINES and waiting.startswith((b"\r\n", b"\n")):
            self._receive_buffer.maybe_extract_at_most(waiting.index(b"\n") + 1)
            self._num_empty_lines += 1
            waiting = self._waiting()
        if waiting == b"\r" and self._num_empty_lines < MAX_EMPTY_LINES:
            return False
        self._check_num_lines(waiting)
        return bool(waiting)

    def _check_pending_lines(self) -> None:
        """What waits in a body for its end is the first line of a chunk, or the trailers.

        A line feed by itself ends a line of a head or trailer (RFC 9112, 2.2), not the first line of a chunk: two
        servers that differ there find different requests in the same bytes.
        """
        waiting = self._waiting()
        if getattr(self._reader, "_reading_trailer", False):
            self._check_num_lines(waiting)
        elif b"\n" in waiting:
            self._refuse("a line feed alone in the first line of a chunk", 400)

    def _check_num_lines(self, waiting: bytes) -> None:
        end = _END_OF_HEAD.search(waiting)
        if waiting.count(b"\n", 0, end.start() if end else len(waiting)) > MAX_HEAD_LINES:
            self._refuse("too many lines", 431)

    def _refuse(self, why: str, status: int) -> None:
        self._process_error(self.their_role)
        raise h11.RemoteProtocolError(why, error_status_hint=status)
