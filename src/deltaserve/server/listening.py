"""Listening: sockets, uvicorn, and a shutdown that lets running requests finish."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from deltaserve.core.errors import ConfigError
from deltaserve.server.app import PROBES, create_admin_app
from deltaserve.server.front import Front
from deltaserve.server.parse_turns import ParseTurns
from deltaserve.server.protocol import PROBE_CONNECTIONS, ListenerState, protocol_factory
from deltaserve.server.settings import ServerSettings
from deltaserve.server.sockets import BACKLOG, listen_for_api, listen_on
from deltaserve.settings.host_and_port import authority

_POLL_S = 0.05
_OTHER_FILES = 1024
_ACCEPTS_AT_ONCE = 16
"""Connections that are taken before any of them is looked at: asyncio's accepts as many as the backlog is long."""
_LATER_FILES = 32
"""Logs and what libraries open once the server listens."""
_FILES_PER_WORKER = 8
"""A link has four: its connection, and one in each of the three sockets that ZeroMQ has for it. Twice as many while
the next link replaces it."""
_ADMIN_CONNECTIONS = 64
"""Connections of the admin routes' own listener: whoever operates the server reaches it when the API's is full."""
_TURNS_TO_CLOSE = 4
"""Turns of the event loop from a connection's accept until one too many is closed; each of them accepts others."""
_FILES_PER_LISTENER = PROBE_CONNECTIONS + _TURNS_TO_CLOSE * _ACCEPTS_AT_ONCE
"""Descriptors of a listener beside its connections."""
_log = logging.getLogger("deltaserve.server")
_HURRIED_S = 0.5
"""How long cut requests may take to say so when the server must end at once."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a front can be reached."""

    url: str
    """URL of the API; a Unix socket as nginx writes it."""
    api: tuple[str, int] | None
    """Address of the API; None for a Unix socket."""
    admin: tuple[str, int] | None
    """Address of the admin routes; None when they are on the API port."""


class _Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: signals belong to the command line."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: Starlette,
    settings: ServerSettings,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    on_listening: Callable[[Listening], None],
) -> None:
    """Serve until `stop` is set, then drain: refuse new requests, wait up to `grace_s`, cut what is left.

    Raises ConfigError when an address cannot be bound. `hurry` ends the grace at once.
    """
    front = app.state.front
    assert isinstance(front, Front)
    connections = _allow_files(settings)
    sockets = [listen_for_api(settings)]
    turns = ParseTurns()
    servers = [_server(app, settings, connections.api, turns)]
    if settings.admin_address is not None:
        sockets.append(listen_on(*settings.admin_address))
        servers.append(_server(create_admin_app(app), settings, connections.admin, turns))
    runs = [asyncio.create_task(server.serve([sock])) for server, sock in zip(servers, sockets, strict=True)]
    try:
        for server, sock in zip(servers, sockets, strict=True):
            await _unless_ended(runs, server.listens)
            sock.listen(BACKLOG)  # uvicorn has set what it was told of, which bounds more than the queue
        on_listening(_where(settings, sockets))
        await _unless_ended(runs, stop)
        await _drain(front, settings, hurry)
    finally:
        for server in servers:
            server.should_exit, server.force_exit = True, hurry.is_set()
        await asyncio.gather(*runs)
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


def _where(settings: ServerSettings, sockets: Sequence[socket.socket]) -> Listening:
    api, *others = (None if sock.family is socket.AF_UNIX else sock.getsockname()[:2] for sock in sockets)
    scheme = "http" if settings.tls is None else "https"
    url = f"http://unix:{settings.uds}:" if api is None else f"{scheme}://{authority(*api)}"
    return Listening(url, api, others[0] if others else None)


@dataclass(frozen=True, slots=True)
class _Connections:
    """The most that each listener takes at a time. With all else that is open they fit in the descriptors."""

    api: int
    admin: int
    """Port of the admin listener; 0: there is none."""


def _allow_files(settings: ServerSettings) -> _Connections:
    """Each connection is an open file. Shells and services usually allow 1,024; a process may raise that by itself, up
    to its hard limit. As many connections as that leaves. Raises ConfigError where it leaves none."""
    wanted = settings.http.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted + _OTHER_FILES + _FILES_PER_WORKER * settings.num_workers
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    num_listeners = 1 if settings.admin_address is None else 2
    others = len(os.listdir("/proc/self/fd")) + _LATER_FILES + _FILES_PER_WORKER * settings.num_workers
    room = allowed - others - _FILES_PER_LISTENER * num_listeners
    admin = 0 if num_listeners == 1 else max(1, min(_ADMIN_CONNECTIONS, room // 4))
    api = min(wanted, room - admin)
    if api < 1:
        raise ConfigError(
            f"this process may open {allowed} files, too few to serve: raise its hard limit (ulimit -Hn) to "
            f"{allowed + 1 - room + admin} or more, for that many connections more"
        )
    if api < wanted:
        _log.warning("at most %d connections at a time: this process may open %d files (ulimit -Hn)", api, allowed)
    return _Connections(api, admin)


async def _unless_ended(runs: list[asyncio.Task[None]], event: asyncio.Event) -> None:
    """Wait for `event`; a server that ends by itself before it is an error."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, *runs}, return_when=asyncio.FIRST_COMPLETED)
        for run in runs:
            if run.done():
                run.result()
                raise ConfigError("a listener ended by itself")
    finally:
        waiting.cancel()


async def _drain(front: Front, settings: ServerSettings, hurry: asyncio.Event) -> None:
    """Requests inside may end until the grace is over; then they are cut, which takes a moment."""
    front.health.draining = True
    await _until_empty(front, settings.grace_s, hurry)
    front.runner.rooms.close()
    await _until_empty(front, _HURRIED_S if hurry.is_set() else settings.http.linger_s, asyncio.Event())


async def _until_empty(front: Front, most_s: float, hurry: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while front.admission.num_requests and not hurry.is_set():
                await asyncio.sleep(_POLL_S)


def _server(app: Starlette, settings: ServerSettings, max_connections: int, turns: ParseTurns) -> _Server:
    http, tls = replace(settings.http, max_connections=max_connections), settings.tls
    return _Server(
        uvicorn.Config(
            app,
            http=protocol_factory(ListenerState(http, PROBES, turns)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            backlog=_ACCEPTS_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(http.keep_alive_s),
            timeout_graceful_shutdown=int(http.linger_s),
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
    )
