"""GET /docs: the API on one page for people, which reads /openapi.json. It needs nothing from elsewhere."""

import hashlib
import re
from base64 import b64encode
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from deltaserve.server.front import Front

_PAGE = (Path(__file__).parent / "docs.html").read_text(encoding="utf-8")


def _source_of(tag: str) -> str:
    """What a policy names the page's one inline block of a kind by: anything else in its place is not run."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    assert len(found) == 1
    return f"'sha256-{b64encode(hashlib.sha256(found[0].encode()).digest()).decode()}'"


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_source_of('script')}; style-src {_source_of('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def page(front: Front, request: Request) -> Response:
    """Serve GET /docs."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


async def home(front: Front, request: Request) -> Response:
    """GET /: the page. The address is relative, as a proxy may serve all of this below a path of its own."""
    return RedirectResponse("docs")
