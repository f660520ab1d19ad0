"""A page for browsers: one file that needs nothing from elsewhere and runs no script but its own."""

import hashlib
import re
from base64 import b64encode
from pathlib import Path

from starlette.responses import HTMLResponse, Response


class HtmlPage:
    """A file of this folder, with one block of styles and one of script."""

    def __init__(self, name: str) -> None:
        self._text = (Path(__file__).parent / name).read_text(encoding="utf-8")
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src {self._source_of('script')}; style-src {self._source_of('style')}; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def reply(self) -> Response:
        """The page."""
        return HTMLResponse(self._text, headers=self._headers)

    def _source_of(self, tag: str) -> str:
        """What a policy names the page's one inline block of a kind by: anything else in its place is not run."""
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", self._text, re.DOTALL)
        assert len(found) == 1
        return f"'sha256-{b64encode(hashlib.sha256(found[0].encode()).digest()).decode()}'"
