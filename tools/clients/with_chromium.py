"""A page in headless Chromium, of another origin than the server's: what it may fetch, read and leave.

The page (with_chromium.html) is served here, at the one origin that the server allows, and sends back what each of its
checks came to.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from urllib.parse import urlencode, urlsplit

from tools.clients.harness import Server, server_of_argv

_PAGE = Path(__file__).with_suffix(".html")
_PATIENCE_S = 600.0
"""From one check's result to the next."""
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
Results = queue.Queue[str]


def find_chromium() -> str | None:
    """Its program, if one is installed."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


def chromium_command(chromium: str, profile: str) -> list[str]:
    """Its program, headless, with an empty profile in that folder; what else it is to do follows."""
    rights = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox is not for root
    return [chromium, *_FLAGS, *rights, f"--user-data-dir={profile}"]


def told_by_page(server: Server, chromium: str) -> Iterator[dict[str, str | None]]:
    """Name of each check as `check`, and as `told` what went wrong or None. Raises RuntimeError when the page stops."""
    results: Results = queue.Queue()
    with _page_served(server, results), TemporaryDirectory() as profile:
        argv = [*chromium_command(chromium, profile), "--remote-debugging-port=0", _address(server)]
        browser = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while (line := results.get(timeout=_PATIENCE_S)) != "null":
                yield json.loads(line)
        except queue.Empty:
            raise RuntimeError(
                f"nothing came from the page for {_PATIENCE_S:.0f} s; exit code: {browser.poll()}"
            ) from None
        finally:
            browser.terminate()
            browser.wait()


def _address(server: Server) -> str:
    """The page's; it tells where the server is, and where the page is under a name that the server does not allow."""
    query = {"url": server.url, "model": server.model}
    stranger = f"http://localhost:{urlsplit(server.page).port}/?{urlencode(query)}"
    return f"{server.page}/?{urlencode({**query, 'stranger': stranger})}"


@contextmanager
def _page_served(server: Server, results: Results) -> Iterator[None]:
    found = urlsplit(server.page)
    with ThreadingHTTPServer((found.hostname or "", found.port or 0), partial(_Handler, results)) as pages:
        thread = Thread(target=pages.serve_forever)
        thread.start()
        try:
            yield
        finally:
            pages.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """The page for every GET; bodies of POST become results."""

    def __init__(self, results: Results, *arguments: object) -> None:
        self._results = results
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._reply(_PAGE.read_bytes())

    def do_POST(self) -> None:
        self._results.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self._reply(b"")

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def main() -> None:
    """A line of JSON for each check, as harness.run prints it."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit(f"there is none of {', '.join(_PROGRAMS)}")
    for told in told_by_page(server_of_argv(), chromium):
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
