"""`deltaserve chat [MODEL|URL]`: a conversation in the terminal, with a running server or one of its own."""

import argparse
import asyncio
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx

from deltaserve.commands.chat.dialogue import (
    HELP,
    ChatHistory,
    ChatOrder,
    Order,
    cost_line,
    counted,
    read_message,
    totals_line,
)
from deltaserve.commands.chat.own_server import SERVE, OwnServerError, own_server
from deltaserve.commands.chat.screen import Screen
from deltaserve.commands.client.bearer_key import authorization
from deltaserve.commands.client.chat_stream import ChatAnswer, ServedModel, chat, find_model
from deltaserve.commands.client.completion_stream import ServerError
from deltaserve.commands.client.http_client import async_http_client, fault
from deltaserve.core.errors import ConfigError, one_line
from deltaserve.launch.compose import free_port
from deltaserve.settings.urls import DEFAULT_URL, server_root

DESCRIPTION = f"""\
Talk to a model. With a URL (default {DEFAULT_URL}) to a running OpenAI-compatible server; with a folder or
a GGUF file `serve` is started for it (prefill and decode on this machine, on a free port) and ended with the chat.
Other settings of that server are DELTASERVE_* variables. After each answer a line tells what it cost: prompt tokens
found in the caches of both sides, bytes moved between them, time to the first token, tokens per second. Where stdin
is no terminal each line is a message: answers go to stdout, everything else to stderr.

"""
_PAGE_SIZE = 16
"""Tokens per page of a server of its own: conversations begin short, and only whole pages are shared."""
_CONNECT_S = 10.0
_SILENCE_S = 600.0
_AGAIN = "(Ctrl-C again, Ctrl-D or /exit ends the chat; /help lists commands)"
_FIELDS = ("temperature", "top_p", "max_tokens", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve chat`."""
    parser.description = DESCRIPTION + HELP
    parser.usage = "deltaserve chat [MODEL|URL] [options]"
    parser.add_argument(
        "target", nargs="?", default=DEFAULT_URL, metavar="MODEL|URL", help="a folder, a GGUF file, or a running server"
    )
    parser.add_argument("--model", metavar="NAME", help="name to ask for; by default the first the server lists")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first key is sent; mode 0600")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt; by default none")
    sampling = parser.add_argument_group("sampling (what is not given is left to the server)")
    sampling.add_argument("--temperature", type=_finite, metavar="X", help="0 is greedy")
    sampling.add_argument("--top-p", type=_finite, metavar="X", help="share of probability that is kept")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="of one answer")
    sampling.add_argument("--seed", type=int, metavar="N", help="equal seeds draw equally")


def _finite(text: str) -> float:
    """JSON knows no other numbers."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def run(arguments: argparse.Namespace) -> int:
    """0; 1 if a message of a script failed, or the server. Raises ConfigError, KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # Ctrl-C alone stops an answer
    headers = authorization(arguments.api_key_file)
    fields = {name: value for name in _FIELDS if (value := vars(arguments)[name]) is not None}
    screen = Screen()
    try:
        with ExitStack() as stack:
            url = _open_target(arguments, screen, stack)
            return talk(url, headers, Wishes(arguments.model, arguments.system, fields), screen)
    except (OwnServerError, ServerError) as error:
        print(f"chat: {one_line(error)}", file=sys.stderr)
        return 1


def _leave(number: int, frame: FrameType | None) -> None:
    """Through all `finally` blocks: a server of its own is ended."""
    sys.exit(128 + number)


def _open_target(arguments: argparse.Namespace, screen: Screen, stack: ExitStack) -> str:
    """Base URL of the running server, or of one that ends with the stack. Raises ConfigError, OwnServerError."""
    target: str = arguments.target
    if os.path.exists(target):  # unlike Path's, False for a name that no file can have
        keys = () if arguments.api_key_file is None else ("--api-key-file", str(arguments.api_key_file))
        port = free_port()
        argv = ("serve", target, "--page-size", str(_PAGE_SIZE), "--port", str(port), *keys)
        with screen.progress(f"starting a server for {target}") as tell:
            stack.enter_context(own_server(SERVE, argv, tell))
        return f"http://127.0.0.1:{port}"
    if "://" not in target and re.fullmatch(r"[A-Za-z0-9.-]+:\d{1,5}(/.*)?", target):
        target = f"http://{target}"
    if not re.match(r"https?://[^/]", target):
        raise ConfigError(
            f"{target[:200]!r}: neither a URL nor a folder or GGUF file here; models are not downloaded "
            "(`hf download NAME --local-dir FOLDER` gets one)"
        )
    return server_root(target)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What every answer is asked for."""

    model: str | None = None
    system: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the request's body."""


def talk(url: str, headers: Mapping[str, str], wishes: Wishes, screen: Screen) -> int:
    """A conversation until the user ends it; 1 if a message of a script failed.

    Raises ServerError where no model is found, KeyboardInterrupt where nobody types, ConfigError.
    """
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    limits = httpx.Limits(max_keepalive_connections=0)  # people pause for longer than servers keep connections
    http = async_http_client(url, timeout, headers, limits)
    with screen.unseen_keys(), asyncio.Runner() as runner:
        try:
            model = runner.run(find_model(http, wishes.model))
            screen.note(f"{model.name} at {url}; /help lists commands, Ctrl-D ends")
            return _Talk(runner, http, model, wishes, screen).run()
        except httpx.HTTPError as error:
            raise ServerError(fault(url, error)) from None
        finally:
            runner.run(http.aclose())


class _Talk:
    """One conversation with one model."""

    def __init__(
        self, runner: asyncio.Runner, http: httpx.AsyncClient, model: ServedModel, wishes: Wishes, screen: Screen
    ) -> None:
        self._runner = runner
        self._http = http
        self._model = model
        self._fields = wishes.fields
        self._screen = screen
        self._history = ChatHistory(wishes.system)
        self._answers: list[ChatAnswer] = []
        self._was_interrupted = False
        self._has_failed = False

    def run(self) -> int:
        while True:
            try:
                text = self._screen.read()
            except KeyboardInterrupt:
                if self._was_interrupted or not self._screen.is_typed:
                    raise
                print()
                self._was_interrupted = True
                self._screen.note(_AGAIN)
                continue
            self._was_interrupted = False
            if text is None or not self._take(text):
                return 1 if self._has_failed and not self._screen.is_typed else 0

    def _take(self, text: str) -> bool:
        """A message or an order; whether the conversation goes on."""
        try:
            match read_message(text):
                case None:
                    pass
                case ChatOrder(Order.EXIT):
                    return False
                case ChatOrder(order, rest):
                    self._screen.note(self._obey(order, rest))
                case message:
                    self._ask(message)
        except ConfigError as error:
            self._fail(error)
        return True

    def _obey(self, order: Order, rest: str) -> str:
        """What was done, in words."""
        history = self._history
        match order:
            case Order.RESET:
                history.reset()
                return "all turns are forgotten"
            case Order.SYSTEM:
                history.system = rest or history.system
                return "no system prompt" if history.system is None else f"system prompt: {history.system}"
            case Order.UNDO:
                left = counted(len(history) - 1, "turn")
                return f"the last turn is forgotten, {left} left" if history.undo() else "there is no turn to forget"
            case Order.STATS:
                return totals_line(self._answers)
            case _:
                return HELP

    def _ask(self, message: str) -> None:
        """One turn. What was said before the user stopped it is kept."""
        answer, screen = ChatAnswer(), self._screen
        body = self._model.body(self._history.messages(message), self._fields)
        try:
            self._runner.run(chat(self._http, body, answer, screen.show))
        except KeyboardInterrupt:
            if not screen.is_typed:
                raise
            self._was_interrupted = True
        except (ServerError, httpx.HTTPError) as error:
            screen.end_answer()
            said = fault(str(self._http.base_url), error) if isinstance(error, httpx.HTTPError) else error
            self._fail(f"{said}; this message is not kept (/reset begins anew)")
            return
        screen.end_answer()
        if answer.text:
            self._history.add(message, answer.text)
        if answer.usage is not None:
            self._answers.append(answer)
        screen.note("(stopped)" if self._was_interrupted else f"({cost_line(answer)})")

    def _fail(self, error: object) -> None:
        self._has_failed = True
        self._screen.warn(f"chat: {one_line(error)}")
