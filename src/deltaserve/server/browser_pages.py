"""Pages for browsers: the API for people, and what the server does, as it does it."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from deltaserve.server.front import Front
from deltaserve.server.html_page import HtmlPage

_DOCS = HtmlPage("docs.html")
_VIEW = HtmlPage("view.html")


async def docs(front: Front, request: Request) -> Response:
    """GET /docs: the API, which the page reads from /openapi.json."""
    return _DOCS.reply()


async def home(front: Front, request: Request) -> Response:
    """GET /: to that page. The address is relative, as a proxy may serve all of this below a path of its own."""
    return RedirectResponse("docs")


async def view(front: Front, request: Request) -> Response:
    """GET /view: workers, trees and requests, which the page asks for every second."""
    return _VIEW.reply()
