"""HTTP/1.1 on a socket: uvicorn's h11 protocol with time limits, connection limits and errors in our shape."""

import asyncio
import contextlib
import ipaddress
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from deltaserve.server.api_errors import ApiError, body_too_large, chunks_too_small, excerpt, retry_after
from deltaserve.server.hosts import in_origin_form
from deltaserve.server.http_parser import FEED_BYTES, BoundedParser
from deltaserve.server.parse_turns import ParseTurns
from deltaserve.server.presence import PresenceTimer, means_nothing
from deltaserve.server.read import new_request_id
from deltaserve.server.replies import ABORT_EXTENSION, error_reply
from deltaserve.server.settings import HttpLimits

_UNPARSED_BYTES = 16 * 1024
"""With more that waits for the parser, nothing more is read."""
_log = logging.getLogger("deltaserve.server")
_UVICORN_LOG = "uvicorn.error.connections"
REQUEST_TIMEOUT = 408
"""A client that was too slow with its body is not given more time for it."""
_MAX_UNSENT_BYTES = 16 * 1024
"""Most unsent bytes of one connection, beside its socket's buffer: with more, whoever makes an answer waits."""

PROBE_CONNECTIONS = 16
"""Beyond the limit on connections, of each listener: whoever watches the server reaches it when it is crowded, too."""
_PROBE_S = 1.0
"""How long such a connection may take to say what it wants."""


class _HeldFlow(FlowControl):
    """Reading goes on when what was read is parsed, and uvicorn has room for more of the body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False

    def hold(self, is_held: bool) -> None:
        """Whether something is there that has not been parsed."""
        if is_held == self._is_held or self._transport.is_closing():
            return
        self._is_held = is_held
        if is_held:
            self._transport.pause_reading()
        elif not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        """Go on where nothing is held."""
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class Extras:
    """The connections of one listener that are beyond its limit, in the order in which they came. The one that has been
    there longest makes room for the next, so that nobody can hold all of them."""

    def __init__(self) -> None:
        self._open: dict[GuardedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: "GuardedProtocol") -> None:
        self._open[connection] = None
        if len(self._open) > PROBE_CONNECTIONS:
            oldest = next(iter(self._open))
            self.discard(oldest)
            oldest.transport.abort()

    def discard(self, connection: "GuardedProtocol") -> None:
        self._open.pop(connection, None)


@dataclass(frozen=True, slots=True)
class ListenerState:
    """What the connections of one listener share."""

    limits: HttpLimits
    probes: frozenset[str]
    """Paths that a connection beyond the limit may ask for."""
    turns: ParseTurns
    extras: Extras = field(default_factory=Extras)


class GuardedProtocol(H11Protocol):
    """One connection. What goes wrong before the application is called is answered here."""

    def __init__(
        self,
        listener: ListenerState,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = logging.getLogger(_UVICORN_LOG)
        self.conn = self._parser = BoundedParser()
        self._limits = listener.limits
        self._probes = listener.probes
        self._extras = listener.extras
        self._turns = listener.turns
        self._is_extra = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._unparsed = bytearray()
        self._has_ended = False
        """Whether the client has said that it sends nothing more."""
        self._is_events = False
        """Whether the answer is a stream of events."""
        self._presence = PresenceTimer(self._ask_whether_there)
        self.app = self._guarded(self.app)

    def _guarded(self, inner: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            scope = in_origin_form(scope)
            is_waited_for = True

            async def receive_within_limit() -> Message:
                message = await receive()
                if (fault := self._body_fault()) is not None:
                    raise fault
                return message

            async def send_and_drop_rest(message: Message) -> None:
                nonlocal is_waited_for
                if message["type"] == "http.response.start":
                    self._is_events = _is_event_stream(message)
                    if self._is_extra or self._body_fault() is not None:
                        message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
                    is_waited_for = message["status"] != REQUEST_TIMEOUT
                elif is_waited_for and self._has_rest(message):
                    await send({**message, "more_body": True})
                    await drop_rest(receive, self._limits)
                    message = {"type": "http.response.body"}
                await send(message)

            scope.setdefault("extensions", {})[ABORT_EXTENSION] = self.transport.abort
            if self._is_extra and scope["path"] not in self._probes:
                await error_reply(_too_many())(scope, receive, send_and_drop_rest)
            else:
                await inner(scope, receive_within_limit, send_and_drop_rest)

        return guarded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; one too many is there for a probe only."""
        super().connection_made(transport)
        self.flow = self._held_flow = _HeldFlow(transport)
        transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)
        if self._is_one_too_many():
            self._is_extra = True
            self._extras.add(self)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the connection's timers."""
        self._extras.discard(self)
        self._disarm_head_timer()
        self._presence.stop()
        for timer in (self._linger_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Keep it until this connection's turn."""
        self._unparsed += data
        if len(self._unparsed) > _UNPARSED_BYTES:
            self._held_flow.hold(True)
        self._turns.add(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. It may still take its answer, where a connection has halves: over TLS it has
        none."""
        self._has_ended = self.transport.can_write_eof()
        if not self._has_ended or self._is_done():
            return False
        self._presence.start()
        return True

    def _is_done(self) -> bool:
        """Whether there is nothing to answer any more."""
        return not (self.has_more() or self._is_owed())

    def _is_owed(self) -> bool:
        """Whether a whole request waits for the end of its answer. By HTTP/1.0 nobody can be asked whether he does."""
        is_whole = self._parser.their_state in (h11.DONE, h11.MUST_CLOSE)
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_whole and not is_answered and self._parser.their_http_version == b"1.1"

    def _ask_whether_there(self) -> bool:
        """Write something to a client that sends nothing more; whether to do it again."""
        if self.transport.is_closing() or self._is_done():
            return False
        nothing = means_nothing(self.conn, self._is_events)
        if nothing is not None and not self.transport.get_write_buffer_size():  # else what waits there asks
            self.transport.write(self.conn.send(nothing) or b"")
        return True

    def parse(self, most: int) -> int:
        """Parse at most so many events of what came, and watch how long a request head takes and what a body is."""
        parser = self._parser
        parser.num_allowed = most
        while parser.num_allowed > 0 and self.has_more():
            if parser.is_stopped:
                self.handle_events()
            else:
                data = bytes(self._unparsed[:FEED_BYTES])
                del self._unparsed[:FEED_BYTES]
                super().data_received(data)
        num_events, parser.num_allowed = most - parser.num_allowed, 0
        self._watch_head()
        if parser.their_state is h11.SEND_BODY and self._body_fault() is not None:
            self.cycle.message_event.set()  # a chunk's first line alone is nothing that the application is told of
        if not self._is_read():
            self._unparsed.clear()
        self._held_flow.hold(bool(self._unparsed))
        self._close_when_done()
        return num_events

    def _close_when_done(self) -> None:
        """A client that sends nothing more has all its answers."""
        if self._has_ended and self._is_done() and not self.transport.is_closing():
            self.transport.close()

    def has_more(self) -> bool:
        """Whether something can be parsed now; the next request waits for the answer to this one."""
        if not self._is_read() or self._parser.is_paused:
            return False
        return self._parser.is_stopped or bool(self._unparsed)

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def _is_read(self) -> bool:
        """Whether anybody wants to know what comes."""
        return not (self._is_refused or self._parser.is_mostly_framing or self.transport.is_closing())

    def on_response_complete(self) -> None:
        """Watch for the next request; a client whose body still goes on is cut."""
        goes_on = self.conn.their_state is h11.SEND_BODY  # asked first: the next request may begin at once
        super().on_response_complete()
        if goes_on:
            self.transport.abort()
        if self.has_more():
            self._turns.add(self)
        self._watch_head()
        self._watch_rest()
        self._close_when_done()

    def _watch_rest(self) -> None:
        """An answer is complete, and its client may never take the rest, or a little now and then: nothing else would
        end the connection then."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and self._rest_timer is None:
            most_s = self._limits.keep_alive_s + num_bytes / self._limits.least_bytes_per_s
            self._wait_for_rest(num_bytes, self.loop.time() + most_s)

    def _wait_for_rest(self, num_bytes: int, until: float) -> None:
        self._rest_timer = self.loop.call_later(self._limits.keep_alive_s, self._rest_due, num_bytes, until)

    def _rest_due(self, num_bytes: int, until: float) -> None:
        self._rest_timer = None
        rest_bytes = self.transport.get_write_buffer_size()
        if rest_bytes >= num_bytes or (rest_bytes and self.loop.time() >= until):
            self.transport.abort()
        elif rest_bytes:
            self._wait_for_rest(rest_bytes, until)

    def shutdown(self) -> None:
        """The server stops: a connection that was refused has nothing to finish."""
        if self._is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: 400, or what it suggests, and close."""
        cause = sys.exception()
        _log.warning("%s sent what is not HTTP/1.1: %s", self._who(), str(cause)[:100])
        status = getattr(cause, "error_status_hint", 400)
        if status == 431:
            self._refuse(
                ApiError(431, "headers_too_large", "the request head, or a line that frames its body, is too large")
            )
        else:
            self._refuse(ApiError(400, "invalid_request", f"not a valid HTTP/1.1 request: {excerpt(str(cause))}"))

    @property
    def peer(self) -> str:
        """The other side's address; empty for a Unix socket."""
        return self.client[0] if self.client else ""

    def _who(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else "somebody"

    def _is_one_too_many(self) -> bool:
        limits, peer = self._limits, self.peer
        if len(self.connections) - len(self._extras) > limits.max_connections:
            return True
        most = limits.max_connections_per_address
        if most is None or not peer or ipaddress.ip_address(peer).is_loopback:
            return False
        return sum(1 for other in self.connections if isinstance(other, GuardedProtocol) and other.peer == peer) > most

    def _watch_head(self) -> None:
        """The timer runs while a request head has begun and is not complete."""
        if self._is_refused or self.transport.is_closing():
            return
        if self._parser.their_state is not h11.IDLE:
            self._disarm_head_timer()
        elif self._parser.is_in_head and self._head_timer is None:
            self._arm_head_timer()

    def _arm_head_timer(self) -> None:
        most_s = self._limits.header_timeout_s
        self._head_timer = self.loop.call_later(
            min(most_s, _PROBE_S) if self._is_extra else most_s, self._head_too_slow
        )

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self._is_extra:
            self._refuse(_too_many())
            return
        self._refuse(ApiError(408, "request_timeout", "the request head did not arrive in time"))

    def _body_fault(self) -> ApiError | None:
        """What is wrong with the body so far, with what the chunk being read announces; None: nothing."""
        num_bytes = self._parser.num_body_bytes
        if num_bytes + self._parser.num_announced_bytes > self._limits.max_body_bytes:
            return body_too_large(self._limits.max_body_bytes)
        if self._parser.is_mostly_framing:
            return chunks_too_small(num_bytes)
        return None

    def _has_rest(self, message: Message) -> bool:
        """Whether this ends an answer while the body of its request is still on the way."""
        return not message.get("more_body", False) and self.conn.their_state is h11.SEND_BODY

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close. What still comes in is dropped for a while: a reset would lose
        the answer."""
        self._disarm_head_timer()
        self._is_refused = True
        if not self._answer(error):
            self.transport.close()
            return
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)

    def _answer(self, error: ApiError) -> bool:
        """False once an answer of the application has begun: then there is only closing."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            return False
        reply = error_reply(error)
        headers = [*reply.raw_headers, (b"connection", b"close"), (b"x-request-id", new_request_id().encode())]
        head = h11.Response(status_code=reply.status_code, headers=headers)
        for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        return True


async def drop_rest(receive: Receive, limits: HttpLimits) -> None:
    """Read a body nobody wants for a while: closing the connection now would be a reset, which loses the answer.

    `asyncio.timeout` twice, as `asyncio.wait_for` of Python 3.11 loses a cancellation where a piece comes with it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.linger_s):
            has_more = True
            while has_more:
                async with asyncio.timeout(limits.linger_silent_s):
                    has_more = (await receive()).get("more_body", False)


def _is_event_stream(start: Message) -> bool:
    headers = dict(start.get("headers", []))
    return bytes(headers.get(b"content-type", b"")).startswith(b"text/event-stream")


def _too_many() -> ApiError:
    return ApiError(503, "too_many_connections", "too many connections", headers=retry_after())


def protocol_factory(listener: ListenerState) -> Callable[..., GuardedProtocol]:
    """What uvicorn calls for each connection. Its own warnings about one are off: they do not say whose it is."""
    logging.getLogger(_UVICORN_LOG).setLevel(logging.ERROR)
    return partial(GuardedProtocol, listener)
