"""The two applications of a front: the public API, and the admin routes (with it, or on a listener of their own)."""

from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.request.client import Engine
from deltaserve.server.api_errors import ApiError
from deltaserve.server.edge import Edge
from deltaserve.server.front import Front
from deltaserve.server.generating_routes import CHAT, COMPLETIONS, GENERATE, serve_dialect
from deltaserve.server.info_routes import InfoRoutes
from deltaserve.server.openapi import document
from deltaserve.server.replies import error_reply, json_reply
from deltaserve.server.settings import Right, ServerSettings
from deltaserve.text.text_codec import TextCodec

Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, str, Handler]
"""(method, path, handler)"""


def create_app(
    engine: Engine, text: TextCodec, settings: ServerSettings, registry: CollectorRegistry | None = None
) -> Starlette:
    """The public application. Its `state.front` is shared with `create_admin_app`."""
    front = Front.build(engine, text, settings, registry or CollectorRegistry())
    routes = _public_routes(front)
    if settings.admin_address is None:
        routes += _admin_routes(front)
    return _application(front, routes, Right.API)


def create_admin_app(app: Starlette) -> Starlette:
    """The admin application of the front that `app` serves."""
    front = app.state.front
    assert isinstance(front, Front)
    return _application(front, _admin_routes(front), Right.ADMIN)


def _public_routes(front: Front) -> list[Route]:
    info = InfoRoutes(front)

    async def completions(request: Request) -> Response:
        return await serve_dialect(front, request, COMPLETIONS)

    async def chat(request: Request) -> Response:
        return await serve_dialect(front, request, CHAT)

    async def generate(request: Request) -> Response:
        return await serve_dialect(front, request, GENERATE)

    async def openapi(request: Request) -> Response:
        return json_reply(document())

    return [
        ("GET", "/openapi.json", openapi),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/generate", generate),
        ("GET", "/v1/models", info.models),
        ("GET", "/v1/models/", info.models),
        ("GET", "/v1/models/{name:path}", info.model),
        ("GET", "/v1/loads", info.loads),
        ("POST", "/tokenize", info.tokenize),
        ("POST", "/detokenize", info.detokenize),
        ("GET", "/health", info.readyz),
        ("GET", "/readyz", info.readyz),
        ("GET", "/livez", info.livez),
        ("GET", "/ping", info.readyz),
        ("GET", "/health_generate", info.health_generate),
        ("GET", "/model_info", info.model_info),
        ("GET", "/get_model_info", info.model_info),
        ("GET", "/version", info.version),
    ]


def _admin_routes(front: Front) -> list[Route]:
    info = InfoRoutes(front)
    return [
        ("GET", "/metrics", info.metrics),
        ("GET", "/server_info", info.server_info),
        ("GET", "/get_server_info", info.server_info),
        ("POST", "/flush_cache", info.flush_cache),
        ("POST", "/admin/drain", info.drain),
        ("POST", "/admin/role", info.change_role),
        ("GET", "/admin/requests/{id}", info.past_request),
    ]


def _application(front: Front, routes: Sequence[Route], right: Right) -> Starlette:
    app = Starlette(exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_exception})
    app.router.redirect_slashes = False
    app.state.front = front
    for method, path, handler in routes:
        app.add_route(path, handler, methods=[method])
    app.add_middleware(Edge, front=front, right=right, known_paths=frozenset(path for _, path, _ in routes))
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_reply(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return error_reply(ApiError(error.status_code, code, error.detail, headers=error.headers or {}))
