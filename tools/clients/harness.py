"""Checks of one client, run by that client's own Python: `python -m tools.clients.with_openai URL MODEL PATH PAGE`.

A line of JSON for each check: its name, and what went wrong or null.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

_MAX_TOLD = 200


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, and what it serves."""

    url: str
    model: str
    """Its name."""
    path: str
    """Its folder or file."""
    page: str
    """The one origin whose pages may call the server."""
    router: str | None = None
    """A router of another project, in front of workers of the same model."""


Check = Callable[[Server], object]
SENTENCE = "Answer in one short sentence: what is the capital of France?"
CITY_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = "weather"
"""Name of the tool that checks offer; its one argument is `city`."""


def run(checks: list[Check]) -> None:
    """Each check in turn; ends the process."""
    run_on(server_of_argv(), checks)


def run_on(server: Server, checks: list[Check]) -> None:
    """Each check in turn, of this server."""
    for check in checks:
        told = _told(check, server)
        print(json.dumps({"check": name_of(check), "told": told}), flush=True)


def server_of_argv() -> Server:
    """As the command line tells it."""
    return Server(*sys.argv[1:])


def name_of(check: Check) -> str:
    """As the table has it."""
    return check.__name__.strip("_").replace("_", " ")


def _told(check: Check, server: Server) -> str | None:
    """What went wrong, in a line; None: nothing."""
    try:
        result = check(server)
        assert not inspect.isawaitable(result), "a check waits for what it starts"
    except Exception as error:  # whatever a client raises
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_TOLD]
    return None


def require(condition: object, what: object = "") -> None:
    """Raises AssertionError that says `what` it found."""
    if not condition:
        raise AssertionError(f"found {what!r}")
