"""What checks of routers ask for by HTTP, with the standard library alone."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tools.clients.harness import require

_WAIT_S = 120.0


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def two_free_ports() -> int:
    """The first of two such ports."""
    while True:
        first = free_port()
        with socket.socket() as next_one, suppress(OSError, OverflowError):
            next_one.bind(("127.0.0.1", first + 1))
            return first


def until(condition: Callable[[], object]) -> None:
    """Raises AssertionError where it does not come."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        require(time.monotonic() < deadline, "it took too long")
        time.sleep(0.1)


def status_of(url: str) -> int:
    """What a GET is answered with; 0: no answer."""
    try:
        with urllib.request.urlopen(url) as reply:
            return int(reply.status)
    except OSError:
        return 0


def post(url: str, body: object) -> tuple[int, str]:
    """Status and text of the answer, also of an error."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return int(reply.status), reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def answer_of(base: str | None, path: str, body: object) -> Any:
    """What a POST brings. Raises AssertionError for an error."""
    status, text = post(f"{base}{path}", body)
    require(status == 200, (status, text))
    return json.loads(text)


def events_of(base: str | None, path: str, body: dict[str, object]) -> list[Any]:
    """Those of a stream up to its end. Raises AssertionError for an error."""
    status, text = post(f"{base}{path}", {**body, "stream": True})
    require(status == 200, (status, text))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    require(lines[-1] == "[DONE]", lines[-1])
    return [json.loads(line) for line in lines[:-1]]


def texts_of(answer: Any) -> list[str]:
    """The text of each choice; none may be empty."""
    found = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    require(all(found), answer)
    return found
