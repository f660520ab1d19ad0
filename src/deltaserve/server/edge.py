"""The outermost ASGI layer: request ids, header limits, keys, last-resort error answers, response counts."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltaserve.core.ids import DEFAULT_NAMESPACE
from deltaserve.server.api_errors import (
    CLIENT_CLOSED,
    NOT_OURS,
    OPENAI_ERRORS,
    ApiError,
    ClientGone,
    excerpt,
)
from deltaserve.server.front import Front
from deltaserve.server.hosts import allowed_hosts, host_name, is_own_name
from deltaserve.server.read import CALLER, ID_CHARACTERS, Caller, new_request_id
from deltaserve.server.replies import error_reply
from deltaserve.server.routes import ID_HEADERS, Access, HttpRoute
from deltaserve.server.settings import ApiKey, Right

_log = logging.getLogger("deltaserve.server")
_SAFE_ID = re.compile(rf"[{ID_CHARACTERS}]{{1,128}}\Z")
OTHER_PATH = "other"
_MAX_HEADER_BYTES, _MAX_HEADERS = 16 * 1024, 100
_MAX_URI_BYTES = 8 * 1024

_SINGLE = (b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"x-deadline-seconds")
"""What a proxy in front of us may read the first of, and we the last."""
_TRACE = re.compile(rb"[0-9a-f]{2}(-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})")
"""W3C Trace Context, `traceparent`: version, trace, span, flags."""


class Edge:
    """Wraps the application of one listener. `right` is what a key must allow to be served here; `routes` are those of
    all listeners, by path."""

    def __init__(
        self, app: ASGIApp, front: Front, right: Right, routes: Mapping[str, HttpRoute], served_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._front = front
        self._right = right
        self._routes = routes
        self._served_paths = served_paths
        self._keys = {_digest(key.secret.encode()): key for key in front.settings.api_keys}
        self._hosts = allowed_hosts(front.settings, right)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"])
        access = route.access if route else Access.KEY
        trace = _trace(scope)
        reply = _Reply(send, _request_id(scope), trace, route)
        try:
            headers = _checked_headers(scope)
            self._check_host(access, headers)
            key = self._authenticate(access, headers)
            namespace = key.namespace if key else DEFAULT_NAMESPACE
            scope[CALLER] = Caller(
                reply.request_id, namespace, time.monotonic(), None if trace is None else trace.decode()
            )
            await self._app(scope, receive, reply.send)
        except ClientGone:
            self._front.metrics.clients_gone.inc()
            reply.status = CLIENT_CLOSED
            # Nobody reads it, but the server below wants every request answered.
            await reply.refuse(ApiError(CLIENT_CLOSED, "client_closed", "client closed"), scope, receive)
        except ApiError as error:
            await reply.refuse(error, scope, receive)
        except NOT_OURS:
            raise
        except BaseException:
            _log.exception("request %s met a bug", reply.request_id)
            self._front.metrics.errors.labels("internal_error").inc()
            message = f"the server failed; its log names {reply.request_id}"
            await reply.refuse(ApiError(500, "internal_error", message), scope, receive)
        finally:
            path = scope["path"] if scope["path"] in self._served_paths else OTHER_PATH
            self._front.metrics.responses.labels(path, str(reply.status)).inc()

    def _check_host(self, access: Access, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError 421 where only names of this machine are answered and the client used another."""
        host = headers.get(b"host")
        if self._hosts is None or host is None or access is Access.PROBE:
            return
        name = host_name(host.decode("latin-1"))
        if name is None or (name not in self._hosts and not is_own_name(name)):
            shown = excerpt(host.decode("latin-1"))
            message = f"the Host header is {shown}: this server answers to localhost and names of --allowed-hosts"
            raise _closing(421, "wrong_host", message)

    def _authenticate(self, access: Access, headers: Mapping[bytes, bytes]) -> ApiKey | None:
        """The key of this request; None when keys are not in use. Raises ApiError 401 or 403."""
        if not self._keys or access is not Access.KEY:
            return None
        digest = _digest(_secret(headers) or b"")
        # Every stored digest is compared, each in constant time, so that timing tells nothing.
        matches = [key for stored, key in self._keys.items() if hmac.compare_digest(stored, digest)]
        if not matches:
            message = "a valid API key is needed (Authorization: Bearer ..., or x-api-key: ...)"
            raise ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
        if self._right not in matches[0].rights:
            raise ApiError(403, "forbidden", f"this key has no {self._right.value} right")
        return matches[0]


class _Reply:
    """A response on its way out: names the request, remembers the status."""

    def __init__(self, send: Send, request_id: str, trace: bytes | None, route: HttpRoute | None) -> None:
        self.request_id = request_id
        names = route.id_headers if route else ID_HEADERS
        self._echoed = [(name, request_id.encode()) for name in names] + ([(b"traceparent", trace)] if trace else [])
        self._errors = route.errors if route else OPENAI_ERRORS
        self.status: int | None = None
        self.started = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), *self._echoed]
        await self._send(message)

    async def refuse(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Answer with an error, unless an answer has begun."""
        if not self.started:
            await error_reply(error, self._errors)(scope, receive, self.send)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _secret(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request brings, as OpenAI's clients send it or as Anthropic's do; None: none.

    Raises ApiError 400 for two keys: a proxy may have looked at the one, and this server at the other.
    """
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    bearer = secret.strip() if scheme.lower() == b"bearer" else None
    other = headers.get(b"x-api-key")
    if bearer is not None and other is not None and bearer != other.strip():
        raise _closing(400, "invalid_request", "authorization and x-api-key bring different keys: send one of them")
    return bearer if other is None else other.strip()


def _trace(scope: Scope) -> bytes | None:
    """The client's `traceparent`, which the answer carries back as it came; None: there is none, or not one."""
    given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
    return given if _TRACE.fullmatch(given) else None


def _request_id(scope: Scope) -> str:
    """The client's own, if it is short and harmless, else a new one. The answer carries it back."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if _SAFE_ID.match(given) else new_request_id()


def _checked_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """Headers by name. Raises ApiError 400, 414, 431."""
    pairs: list[tuple[bytes, bytes]] = list(scope["headers"])
    uri_bytes = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
    if uri_bytes > _MAX_URI_BYTES:
        raise _closing(414, "uri_too_long", f"the URI is longer than {_MAX_URI_BYTES} bytes")
    num_bytes = sum(len(name) + len(value) + 4 for name, value in pairs)
    if len(pairs) > _MAX_HEADERS or num_bytes > _MAX_HEADER_BYTES:
        most = f"{_MAX_HEADERS} headers, {_MAX_HEADER_BYTES} bytes"
        raise _closing(431, "headers_too_large", f"at most {most} are allowed")
    headers = dict(pairs)
    for name in _SINGLE:
        if name in headers and sum(name == other for other, _ in pairs) > 1:
            raise _closing(400, "invalid_request", f"the header {name.decode()} is there twice")
    if scope["http_version"] not in ("1.0", "1.1"):
        raise _closing(400, "invalid_request", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise _closing(400, "invalid_request", "content-length and transfer-encoding exclude each other")
    return headers


def _closing(status: int, code: str, message: str) -> ApiError:
    return ApiError(status, code, message, headers={"Connection": "close"})
