"""`deltaserve COMMAND ...`: finds the command, hands it its settings, turns errors into lines and exit code 2."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import deltaserve
from deltaserve.core.errors import ConfigError, one_line
from deltaserve.launch.lacking import lacking
from deltaserve.process.children.interrupts import EXIT_INTERRUPTED
from deltaserve.process.children.terminal import say, say_in_json
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.flag_help import About
from deltaserve.settings.flags.line_parser import LineParser
from deltaserve.settings.flags.merge import command_of, read_line
from deltaserve.settings.flags.options import nearest
from deltaserve.settings.flags.problems import problems_of, raise_problems
from deltaserve.settings.flags.yaml_file import write_yaml
from deltaserve.settings.urls import api_url

EXIT_CONFIG = 2
_USE, _MACHINES, _LOOK = "use a model", "workers started by hand, on one machine or several", "look at what runs"
_WRONG = f"{EXIT_CONFIG} wrong options, {EXIT_INTERRUPTED} interrupted"
_SERVES = "0 it was asked to end, 1 a process could not be kept running"


@dataclass(frozen=True, slots=True)
class Command:
    """A module that is imported only when its command runs.

    With settings it has `run(settings: Settings) -> int` and `rehearse(settings: Settings) -> dict[str, str]`: run's
    checks of the settings alone, and what those that are "auto" came to, by field. Without, `add_arguments(parser)` and
    `run(arguments: argparse.Namespace) -> int`. The result of `run` is the exit code.
    """

    module: str
    summary: str
    has_settings: bool = False
    commands: tuple[str, ...] = ()
    """`deltaserve NAME COMMAND ARGV` looks at the line of another command: `run_for(command, argv) -> int`."""
    group: str = _USE
    """Heading in the list of commands."""
    example: str = ""
    """What follows `deltaserve NAME` in a line to begin with."""
    exits: str = "0 done, 1 it failed"

    begin: Callable[[Settings], str] | None = None
    """Makes a line for the user before anything is imported, for a command with settings that has nothing to say
    for long."""

    def about(self, name: str) -> About:
        """What --help tells of the command."""
        example = f"example: deltaserve {name} {self.example}\n" if self.example else ""
        return About(self.summary, f"{example}exit codes: {self.exits}, {_WRONG}")


def _begin_routing(settings: Settings) -> str:
    network = settings.network
    known = (network.workers, network.workers_file, network.workers_dns)
    where = f"will serve at {api_url(network)}, waits for its workers {', '.join(filter(None, known))}"
    return f"router of {settings.model.model_path}: {where}"


COMMANDS = {
    "serve": Command(
        "deltaserve.launch.serve",
        "serve a model from this machine: front, prefill and decode workers",
        has_settings=True,
        example="models/recall-micro --port 30000",
        exits=_SERVES,
    ),
    "chat": Command(
        "deltaserve.commands.chat.command",
        "talk to a model: to a running server, or to a folder or GGUF file",
        example="models/recall-micro",
        exits="0 the chat ended, 1 the server failed, or refused a line of a script",
    ),
    "demo": Command(
        "deltaserve.commands.demo.demo",
        "a tiny model on this machine, and what moved between the workers",
        example="--quick",
        exits="0 every answer was right, 1 some were not, or the server failed",
    ),
    "prefill": Command(
        "deltaserve.launch.prefill",
        "one prefill worker, for `router` to use",
        has_settings=True,
        group=_MACHINES,
        example="MODEL --cluster-key-file cluster.key --disaggregation-bootstrap-port 8998",
        exits=_SERVES,
    ),
    "decode": Command(
        "deltaserve.launch.decode",
        "one decode worker, for `router` to use",
        has_settings=True,
        group=_MACHINES,
        example="MODEL --cluster-key-file cluster.key --disaggregation-bootstrap-port 8999",
        exits=_SERVES,
    ),
    "router": Command(
        "deltaserve.launch.router",
        "the front alone, for workers on other machines",
        has_settings=True,
        group=_MACHINES,
        example="MODEL --cluster-key-file cluster.key --workers prefill@127.0.0.1:8998,decode@127.0.0.1:8999",
        exits=_SERVES,
        begin=_begin_routing,
    ),
    "dynamo": Command(
        "deltaserve.commands.dynamo.command",
        "make a running server a worker of NVIDIA Dynamo, behind its frontend",
        group=_MACHINES,
        example="--base-url http://127.0.0.1:30000 --discovery-backend file",
        exits="0 it was asked to end, 1 it failed",
    ),
    "doctor": Command(
        "deltaserve.commands.doctor.doctor",
        "what this machine offers, where a server would listen; `doctor prefill ...`: could that run here?",
        commands=("prefill", "decode", "router"),
        group=_LOOK,
        example="--base-url http://127.0.0.1:30000",
        exits="0 nothing stands in the way, 1 a check fails",
    ),
    "top": Command(
        "deltaserve.commands.top.command",
        "what a running server is doing, as it does it: requests, caches, workers",
        group=_LOOK,
        example="--base-url http://127.0.0.1:30000",
        exits="0 it was looked at, 1 it could not be",
    ),
    "verify": Command(
        "deltaserve.commands.verify.verify",
        "compare a server's answers with a reference",
        group=_LOOK,
        example="MODEL --base-url http://127.0.0.1:30000",
        exits="0 every answer agrees, 1 some do not, or a server could not be asked",
    ),
    "bench": Command(
        "deltaserve.commands.bench.command",
        "measure a running server with a shared-prefix workload",
        group=_LOOK,
        example="--num-groups 4 --prompts-per-group 8 --max-concurrency 8",
        exits="0 every request was completed, 1 some failed, or the server could not be reached",
    ),
    "sim": Command(
        "deltaserve.commands.simulate.sim",
        "the control planes in virtual time, under faults: prove it safe",
        group=_LOOK,
        example="faults --seeds 300",
        exits="0 no law was broken, 1 one was",
    ),
}


def dispatch(argv: Sequence[str], before_run: Callable[[], None]) -> int:
    """Exit code of `deltaserve argv`. `before_run` is called when the command is imported and about to run."""
    try:
        return _dispatch(argv, before_run)
    except ConfigError as error:
        _tell([one_line(problem) for problem in problems_of(error)])
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _tell(problems: Sequence[str]) -> None:
    """One line, or a heading and one for each."""
    heading = f"{len(problems)} things stand in the way:\n  " if len(problems) > 1 else ""
    say(heading + "\n  ".join(problems))


def available() -> dict[str, Command]:
    """Commands by name whose module exists."""
    return {name: command for name, command in COMMANDS.items() if importlib.util.find_spec(command.module)}


def _dispatch(argv: Sequence[str], before_run: Callable[[], None]) -> int:
    commands = available()
    if list(argv[:1]) == ["help"] and argv[1:2] and argv[1] in commands:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(commands))
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"deltaserve {deltaserve.__version__}")
        return 0
    name = argv[0]
    if name.startswith("-"):
        raise ConfigError(f"{name[:80]}: a command comes first, such as `deltaserve serve MODEL` (--help lists them)")
    if name not in commands:
        raise ConfigError(f"{name[:80]!r}: unknown command{nearest(name, commands)} (deltaserve --help lists them)")
    command = commands[name]
    if argv[1:2] and argv[1] in command.commands:
        before_run()
        run_for: Callable[[str, Sequence[str]], int] = importlib.import_module(command.module).run_for
        return run_for(argv[1], argv[2:])
    if command.has_settings:
        return _run_with_settings(name, argv[1:], commands, before_run)
    module = importlib.import_module(command.module)
    about = command.about(name)
    parser = LineParser(f"deltaserve {name}", about.summary, about.epilog)
    module.add_arguments(parser)
    arguments = parser.parse_all(argv[1:])
    before_run()
    run: Callable[[Any], int] = module.run
    return run(arguments)


def _run_with_settings(
    given: str, argv: Sequence[str], commands: Mapping[str, Command], before_run: Callable[[], None]
) -> int:
    name = command_of(given, argv)
    if name != given:
        say(f"--disaggregation-mode {name} makes this `deltaserve {name}`")
    command = commands[name]
    line = read_line(name, command.about(name), argv, os.environ)
    for note in line.notes:
        say(note)
    raise_problems([*line.problems, *lacking(name, line.settings)])
    if command.begin is not None and not line.dump_config:
        is_json = line.settings.logging.log_format == "json"
        tell = say_in_json(name, sys.stderr) if is_json else say
        tell(command.begin(line.settings))
    module = importlib.import_module(command.module)
    if line.dump_config:
        print(write_yaml(line.settings, module.rehearse(line.settings)), end="")
        return 0
    before_run()
    run: Callable[[Any], int] = module.run
    return run(line.settings)


def _usage(commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    groups = [
        "\n".join([f"{group}:", *(f"  {name:<{width}}  {command.summary}" for name, command in rows)])
        for group, rows in groupby(commands.items(), lambda row: row[1].group)
    ]
    head = "usage: deltaserve COMMAND ...\n       deltaserve --version"
    return "\n\n".join(
        [head, *groups, "`deltaserve COMMAND --help` explains the options of a command, with an example."]
    )
