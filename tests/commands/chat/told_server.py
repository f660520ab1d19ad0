"""A server that says of an answer what a test tells it to say, when the test does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from threading import Thread
from typing import Any

from tests.patience import PATIENCE_S

END = None


class ToldServer(ThreadingHTTPServer):
    """Chats as OpenAI's API has them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: Queue[str] = Queue()
        self._pieces: Queue[dict[str, str] | None] = Queue()

    def say(self, *texts: str | None, name: str = "content") -> None:
        """Pieces of the answer, or END of it."""
        for text in texts:
            self._pieces.put(None if text is END else {name: text})

    def next_message(self) -> str:
        """The last one of the next request."""
        return self.asked.get(timeout=PATIENCE_S)

    def pieces(self) -> Iterator[dict[str, str]]:
        while (piece := self._pieces.get(timeout=PATIENCE_S)) is not None:
            yield piece


class _Handler(BaseHTTPRequestHandler):
    server: ToldServer

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "told"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.put(body["messages"][-1]["content"])
        self._begin("text/event-stream")
        with suppress(ConnectionError):  # whoever asked has heard enough
            for delta in self.server.pieces():
                self._event({"choices": [{"delta": delta}]})
            self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def told_server() -> Iterator[ToldServer]:
    with ToldServer() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
