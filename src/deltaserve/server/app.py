"""The two applications of a front: the public API, and the admin routes (with it, or on a listener of their own)."""

import re
from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.control.front.client import Engine
from deltaserve.server import browser_pages, view_routes
from deltaserve.server import info_routes as info
from deltaserve.server.api_errors import ApiError, excerpt
from deltaserve.server.dialects.registry import DIALECTS
from deltaserve.server.edge import Edge
from deltaserve.server.field_errors import only
from deltaserve.server.front import Front
from deltaserve.server.openapi import document
from deltaserve.server.replies import json_reply
from deltaserve.server.routes import Access, HttpRoute
from deltaserve.server.settings import Right, ServerSettings
from deltaserve.server.spans import SpanSink
from deltaserve.server.text.text_codec import TextCodec


def create_app(
    engine: Engine,
    text: TextCodec,
    settings: ServerSettings,
    spans: SpanSink | None = None,
) -> Starlette:
    """The public application. Its `state.front` is shared with `create_admin_app`. `spans`: where those of requests
    go."""
    front = Front.build(engine, text, settings, spans)
    # Where both are, the admin routes' own /server_info is the one that tells all.
    metrics = (OPEN_METRICS,) if settings.shows_metrics and settings.admin_address else ()
    app = _application(front, PAGES + metrics + (PUBLIC if settings.admin_address else ADMIN + PUBLIC), Right.API)
    if settings.allowed_origins:
        _allow_origins(app, settings.allowed_origins)
    return app


def create_admin_app(app: Starlette) -> Starlette:
    """The admin application of the front that `app` serves."""
    front = app.state.front
    assert isinstance(front, Front)
    return _application(front, ADMIN, Right.ADMIN)


def _allow_origins(app: Starlette, origins: Sequence[str]) -> None:
    """Let pages of these origins call `app`. Outside of the edge: a browser asks first, without a key, and reads no
    error without these headers."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        allow_private_network=True,  # pages of elsewhere may reach a server on loopback: those that are named
        expose_headers=("X-Request-Id", "Request-Id", "Retry-After", "traceparent"),
    )


async def openapi(front: Front, request: Request) -> Response:
    """Serve GET /openapi.json."""
    return json_reply(document(PUBLIC))


PUBLIC = (
    *(route for dialect in DIALECTS for route in (dialect.route, *dialect.beside)),
    HttpRoute("POST", "/tokenize", info.tokenize, "Ids of a prompt or a conversation", info.TokenizeBody),
    HttpRoute("POST", "/detokenize", info.detokenize, "Text of token ids", info.DetokenizeBody),
    HttpRoute("GET", "/v1/models", info.models, "The model served"),
    HttpRoute("GET", "/v1/models/", info.models, "The model served"),
    HttpRoute("GET", "/v1/models/{name:path}", info.model, "The model, by its name"),
    HttpRoute("GET", "/v1/loads", info.loads, "Requests that run and that wait"),
    HttpRoute("GET", "/get_load", info.load, "Requests that run and that wait", answer="array"),
    HttpRoute("GET", "/model_info", info.model_info, "Vocabulary, context length, version"),
    HttpRoute("GET", "/get_model_info", info.model_info, "Vocabulary, context length, version"),
    HttpRoute("GET", "/server_info", info.server_facts, "Names and paths of the model, for routers"),
    HttpRoute("GET", "/get_server_info", info.server_facts, "Names and paths of the model, for routers"),
    HttpRoute("GET", "/version", info.version, "Version of this server"),
    HttpRoute("GET", "/health", info.readyz, "Ready for requests, or why not", access=Access.PROBE),
    HttpRoute("GET", "/readyz", info.readyz, "Ready for requests, or why not", access=Access.PROBE),
    HttpRoute("GET", "/ping", info.readyz, "Ready for requests, or why not", access=Access.PROBE),
    HttpRoute("GET", "/health_generate", info.health_generate, "One token is generated"),
    HttpRoute("GET", "/livez", info.livez, "Alive", access=Access.PROBE),
    HttpRoute("GET", "/openapi.json", openapi, "This document"),
)
PAGES = (
    HttpRoute("GET", "/", browser_pages.home, "To the page", access=Access.PAGE),
    HttpRoute("GET", "/docs", browser_pages.docs, "The API, for people", access=Access.PAGE),
)
"""Pages for browsers; no part of the API that /openapi.json describes."""
ADMIN = (
    HttpRoute("GET", "/metrics", info.metrics, "Prometheus metrics"),
    HttpRoute("GET", "/server_info", info.server_info, "Requests inside, workers, counters"),
    HttpRoute("GET", "/get_server_info", info.server_info, "Requests inside, workers, counters"),
    HttpRoute("POST", "/flush_cache", info.flush_cache, "Drop the pages that no request holds"),
    HttpRoute("POST", "/reset_prefix_cache", info.flush_cache, "Drop the pages that no request holds"),
    HttpRoute("POST", "/admin/drain", info.drain, "Take no new requests"),
    HttpRoute("POST", "/admin/role", info.change_role, "Give a worker another role"),
    HttpRoute("GET", "/admin/workers", info.workers, "Workers, and whether they are used"),
    HttpRoute("POST", "/admin/workers/join", info.join_worker, "Use a worker that listens there"),
    HttpRoute("POST", "/admin/workers/leave", info.remove_worker, "Use a worker no more"),
    HttpRoute(
        "GET", "/admin/requests", view_routes.requests, "Requests inside, and where the time of recent ones went"
    ),
    HttpRoute("GET", "/admin/requests/{id}", view_routes.past_request, "Where a recent request's time went"),
    HttpRoute("GET", "/admin/trees", view_routes.trees, "What each worker's tree holds, and who leases it"),
    HttpRoute("GET", "/view", browser_pages.view, "All of this as it happens, for people", access=Access.PAGE),
)
OPEN_METRICS = HttpRoute("GET", "/metrics", info.metrics, "Prometheus metrics", access=Access.PAGE)
"""On the API's listener, where its operator says so."""
EVERY = {route.path: route for route in PAGES + PUBLIC + ADMIN}
"""By path, whichever listener they are on."""
PROBES = frozenset(path for path, route in EVERY.items() if route.access is Access.PROBE)


def _application(front: Front, routes: Sequence[HttpRoute], right: Right) -> Starlette:
    app = Starlette(exception_handlers={HTTPException: _on_http_exception})
    app.router.redirect_slashes = False
    app.state.front = front
    for route in routes:
        app.add_route(route.path, partial(route.serve, front), methods=[route.method])
    served = frozenset(route.path for route in routes)
    known = {**EVERY, **({"/metrics": OPEN_METRICS} if OPEN_METRICS in routes else {})}
    app.add_middleware(Edge, front=front, right=right, routes=known, served_paths=served)
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals: unknown path, wrong method. Raises them as what the edge answers."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    headers = error.headers or {}
    details = {404: _no_route(request), 405: _no_method(request, headers.get("Allow"))}
    detail = details.get(error.status_code, error.detail)
    raise ApiError(error.status_code, code, detail, headers=headers)


def _no_route(request: Request) -> str:
    """Why there is nothing at the path of `request`."""
    if any(request.scope["path"] == route.path for route in ADMIN):
        address = request.app.state.front.settings.admin_address
        where = f", port {address[1]}" if address and address[1] else ""
        return f"not on this listener: the admin routes have one of their own{where} (--admin-host, --admin-port)"
    if request.scope["path"] == "/v1/embeddings":
        return "embeddings are not made here: this server answers prompts and chats; serve an embedding model elsewhere"
    return "there is no such route; /docs and /openapi.json list those there are"


def _no_method(request: Request, allowed: str | None) -> str:
    rest = f", {only(sorted(re.split(r', *', allowed)))}" if allowed else ""
    return f"{excerpt(request.method)} is not allowed on this route{rest}"
