"""`deltaserve COMMAND ...`: finds the command, hands it its settings, turns errors into one line and exit code 2."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import deltaserve
from deltaserve.base.errors import ConfigError, one_line
from deltaserve.cli.options import nearest
from deltaserve.cli.settings_merge import LineParser, load
from deltaserve.cli.yaml_file import write_yaml
from deltaserve.engine.interrupts import EXIT_INTERRUPTED

EXIT_CONFIG = 2


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


COMMANDS = {
    "serve": Command(
        "deltaserve.cli.serve", "serve a model from this machine: front, prefill and decode workers", True
    ),
    "prefill": Command("deltaserve.cli.prefill", "one prefill worker, for `router` to use", True),
    "decode": Command("deltaserve.cli.decode", "one decode worker, for `router` to use", True),
    "router": Command("deltaserve.cli.router", "the front alone, for workers on other machines", True),
    "demo": Command("deltaserve.cli.demo", "a tiny model on this machine, and what moved between the workers"),
    "bench": Command("deltaserve.bench.command", "measure a running server with a shared-prefix workload"),
    "verify": Command("deltaserve.cli.verify", "compare a server's answers with a reference"),
    "sim": Command("deltaserve.cli.sim", "the control planes in virtual time, under faults: prove it safe"),
    "doctor": Command(
        "deltaserve.cli.doctor",
        "what this machine offers, where a server would listen; `doctor prefill ...`: could that run here?",
        commands=("prefill", "decode", "router"),
    ),
}


def dispatch(argv: Sequence[str], before_run: Callable[[], None]) -> int:
    """Exit code of `deltaserve argv`. `before_run` is called when the command is imported and about to run."""
    try:
        return _dispatch(argv, before_run)
    except ConfigError as error:
        print(f"deltaserve: {one_line(error)}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def available() -> dict[str, Command]:
    """Commands whose module exists."""
    return {name: command for name, command in COMMANDS.items() if importlib.util.find_spec(command.module)}


def _dispatch(argv: Sequence[str], before_run: Callable[[], None]) -> int:
    commands = available()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(commands))
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"deltaserve {deltaserve.__version__}")
        return 0
    name = argv[0]
    if name not in commands:
        raise ConfigError(f"{name[:80]!r}: unknown command{nearest(name, commands)} (deltaserve --help lists them)")
    command = commands[name]
    if argv[1:2] and argv[1] in command.commands:
        before_run()
        run_for: Callable[[str, Sequence[str]], int] = importlib.import_module(command.module).run_for
        return run_for(argv[1], argv[2:])
    return _prepare(name, command, argv[1:], before_run)


def _prepare(name: str, command: Command, argv: Sequence[str], before_run: Callable[[], None]) -> int:
    run: Callable[[Any], int]
    settings: object
    if command.has_settings:
        line = load(name, command.summary, argv, os.environ)
        for note in line.notes:
            print(f"deltaserve: {note}", file=sys.stderr)
        module = importlib.import_module(command.module)
        if line.dump_config:
            print(write_yaml(line.settings, module.rehearse(line.settings)), end="")
            return 0
        run, settings = module.run, line.settings
    else:
        module = importlib.import_module(command.module)
        parser = LineParser(f"deltaserve {name}", command.summary)
        module.add_arguments(parser)
        run, settings = module.run, parser.parse_all(argv)
    before_run()
    return run(settings)


def _usage(commands: dict[str, Command]) -> str:
    rows = "\n".join(f"  {name:<9} {command.summary}" for name, command in commands.items())
    return f"usage: deltaserve COMMAND ...\n\n{rows}\n\n`deltaserve COMMAND --help` explains the options of a command."
