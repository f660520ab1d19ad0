"""`deltaserve top`: a running server, looked at again and again."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deltaserve.commands.client.admin import ask_admin, ask_text
from deltaserve.commands.client.http_client import fault, http_client
from deltaserve.commands.top.figures import Look, ServerFigures, figures, series_of
from deltaserve.commands.top.screen import WIDTH, fitted, shown
from deltaserve.commands.top.trees import tree_lines
from deltaserve.commands.top.waterfall import request_lines
from deltaserve.core.errors import ConfigError
from deltaserve.process.front.secrets import read_api_keys
from deltaserve.server.settings import ApiKey
from deltaserve.settings.urls import DEFAULT_URL, server_root

_FEWEST_S = 0.2
_LIVE_TIMEOUT_S = 3.0
_PAGE = "/view"
_Lines = Callable[[Mapping[str, Any]], Iterable[str]]
_EXTRAS: Mapping[str, tuple[str, _Lines]] = {
    "trees": ("/admin/trees", tree_lines),
    "requests": ("/admin/requests", request_lines),
}
"""Option |-> route of what it shows, and the lines that are made of the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve top`."""
    parser.description = (
        "What a running server is doing: requests, tokens, what its caches hold and find, and each worker. It only "
        "reads, and shows no text of any request. Where stdout is no terminal each look is printed below the last. "
        "The same is a page of the server, for browsers: /view where its admin routes are."
    )
    parser.add_argument("url", nargs="?", metavar="URL", help=f"the server (default {DEFAULT_URL})")
    parser.add_argument("--base-url", metavar="URL", help="the same, as other commands call it")
    parser.add_argument("--admin-url", metavar="URL", help="where it has its admin routes; with keys, one port above")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys as for `serve`; the first admin key is sent"
    )
    parser.add_argument("--trees", action="store_true", help="also the largest prefixes in each worker's tree")
    parser.add_argument("--requests", action="store_true", help="also where the time of the last requests went")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="two looks, an interval apart, and the figures of both")
    parser.add_argument("--json", action="store_true", help="figures as JSON, a line for each look")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 0, or 1 where the first look fails. Raises ConfigError."""
    if not _FEWEST_S <= arguments.interval < math.inf:  # nor NaN
        raise ConfigError(f"--interval {arguments.interval:g}: from {_FEWEST_S:g} s on")
    if None not in (arguments.url, arguments.base_url) and arguments.url != arguments.base_url:
        raise ConfigError(f"URL {arguments.url} and --base-url {arguments.base_url} differ: give one of them")
    keys = read_api_keys(arguments.api_key_file) if arguments.api_key_file else ()
    extras = [name for name in _EXTRAS if getattr(arguments, name)]
    watch = _Watch(arguments.url or arguments.base_url or DEFAULT_URL, arguments.admin_url, keys, extras)
    first = watch.look()
    if isinstance(first, str):
        print(first, file=sys.stderr)
        return 1
    try:
        if arguments.once or arguments.json or not sys.stdout.isatty():
            _print(watch, arguments)
        else:
            _live(watch, arguments.interval)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # whoever reads has seen enough
    return 0


@dataclass(frozen=True, slots=True)
class _OneLook:
    """What one look found."""

    figures: ServerFigures
    extras: Mapping[str, Mapping[str, Any]]
    """What was asked for besides, by option."""
    parts: Sequence[Sequence[str]]
    """Lines of `extras`."""


class _Watch:
    """Looks at one server, and what each comes to beside the one before it."""

    def __init__(self, base_url: str, admin_url: str | None, keys: Sequence[ApiKey], extras: Sequence[str]) -> None:
        """`extras`: options, of `_EXTRAS`, for what else is shown. Raises ConfigError for what is no URL."""
        base_url = base_url.rstrip("/").removesuffix(_PAGE)  # as a browser has it
        self.where = server_root(base_url)
        http_client(self.where, _LIVE_TIMEOUT_S).close()
        self._places = base_url, admin_url, keys
        self._extras = extras
        self._last: Look | None = None

    def look(self) -> _OneLook | str:
        """What is there now, or why that is not known."""
        base_url, admin_url, keys = self._places
        try:
            answer = ask_admin("/server_info", base_url, admin_url, keys)
            if answer.content is None:
                with http_client(self.where, _LIVE_TIMEOUT_S) as http:
                    http.get("/livez")  # is there a server at all?
                return f"{self.where}: its admin routes do not answer: {answer.refusal}"
            now = Look(time.monotonic(), answer.content, series_of(ask_text("/metrics", answer.root, keys)))
            found = figures(now, self._last)
            extras = {name: json.loads(ask_text(_EXTRAS[name][0], answer.root, keys)) for name in self._extras}
            told = _OneLook(found, extras, [list(_EXTRAS[name][1](content)) for name, content in extras.items()])
        except httpx.HTTPError as error:
            return fault(self.where, error)
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{self.where}: what answers for the admin routes is not deltaserve, or of another version"
        self._last = now
        return told


def _print(watch: _Watch, arguments: argparse.Namespace) -> None:
    """Each look below the last."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    while True:
        time.sleep(arguments.interval)
        told = watch.look()
        if isinstance(told, str):
            print(told, file=sys.stderr)
        elif arguments.json:
            print(json.dumps({**dataclasses.asdict(told.figures), **told.extras}), flush=True)
        else:
            console.print(shown(told.figures, watch.where, console.width))
            for part in told.parts:
                console.print(Text("\n".join(["", *part]), no_wrap=True, overflow="ignore"), crop=False)
        if arguments.once:
            return


def _live(watch: _Watch, interval_s: float) -> None:
    """Until Ctrl-C, on the terminal's other screen."""
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            told = watch.look()
            live.update(
                Text(told, style="red") if isinstance(told, str) else _screen(told, watch.where, console), refresh=True
            )
            time.sleep(interval_s)


def _screen(told: _OneLook, where: str, console: Console) -> RenderableType:
    """As much as the terminal has room for."""
    width, height = console.size
    table = shown(told.figures, where, width)
    return Group(table, fitted(told.parts, height - len(console.render_lines(table))))
