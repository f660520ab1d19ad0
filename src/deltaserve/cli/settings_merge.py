"""Flags, environment and YAML merged into one Settings: flag > environment > YAML > default.

Every value is checked where it stands, also one that is overridden: nothing wrong is ever ignored.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from deltaserve.base.config import Settings
from deltaserve.base.config_rules import check_rules
from deltaserve.base.errors import ConfigError
from deltaserve.cli.foreign import (
    ACCEPTED,
    ALIASES,
    REFUSED,
    RENAMED,
    SWITCHES,
    advice_elsewhere,
    check_foreign,
    check_value,
    foreign_notes,
)
from deltaserve.cli.options import ENV_PREFIX, MISSPELT, Option, nearest, read_options
from deltaserve.cli.yaml_file import read_yaml

_CONFIG_ENV = f"{ENV_PREFIX}CONFIG"
_HELP_ALL = "--help-all"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command was asked."""

    settings: Settings
    dump_config: bool
    """Print the settings and end."""
    notes: tuple[str, ...] = ()
    """Lines for the user about flags that were accepted and change nothing."""


class LineParser(argparse.ArgumentParser):
    """Errors are ConfigErrors of one line; no abbreviations; help keeps its line breaks."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ").replace("ignored explicit argument", "takes no value, leave out")
        raise ConfigError(said)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Everything must be known. Raises ConfigError, which names the nearest flag."""
        found, unknown = self.parse_known_args(list(argv))
        for flag in (text.split("=")[0] for text in unknown if is_flag(text)):
            raise ConfigError(f"{flag}: unknown flag{nearest(flag, self._option_string_actions)}")
        if unknown:
            raise ConfigError(f"{unknown[0]!r}: not expected here; values come after their flags")
        return found


def is_flag(text: str) -> bool:
    return text.startswith("-") and len(text) > 1


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=112)


class _Once(argparse.Action):
    """Stores a text; a second one is an error, not a silent replacement."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        if self.dest in namespace:
            raise ConfigError(f"{flag or 'MODEL'}: given twice")
        setattr(namespace, self.dest, "true" if self.nargs == 0 else values)


def load(command: str, description: str, argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Settings of `deltaserve COMMAND argv`. Raises ConfigError; ends the process after --help."""
    options = read_options()
    flags = _parse_flags(command, description, options, argv)
    config = flags.pop("config", environ.get(_CONFIG_ENV))
    dump_config = flags.pop("dump_config", None) is not None
    notes = foreign_notes(command, flags)
    values: dict[str, object] = {}
    if config is not None:
        values |= _from_yaml(command, options, Path(config))
    values |= _from_environment(options, environ)
    values |= _from_flags(command, options, flags)
    return CommandLine(_build(command, options, values), dump_config, notes)


def read_settings(command: str, path: Path) -> Settings:
    """Settings from a file alone, as a supervisor hands them to a worker. Raises ConfigError."""
    options = read_options()
    return _build(command, options, _from_yaml(command, options, path))


def _build(command: str, options: Iterable[Option], values: Mapping[str, object]) -> Settings:
    tree: dict[str, dict[str, object]] = {}
    for option in options:
        group = tree.setdefault(option.group, {})
        if option.key in values:
            group[option.field] = values[option.key]
    settings = Settings.model_validate(tree)
    check_rules(settings, command)
    return settings


# ---------------------------------------------------------------- the three sources: key |-> checked value


def _from_yaml(command: str, options: Iterable[Option], path: Path) -> dict[str, object]:
    known = {option.key: option for option in options}
    values: dict[str, object] = {}
    for given, value in read_yaml(path).items():
        where, key = f"{given} in {path}:", ALIASES.get(given, given)
        if key in values:
            raise ConfigError(f"{key} in {path}: given twice, as {given} too")
        if key in known:
            if not check_value(command, key, str(value), where):
                values[key] = known[key].check(value, where)
        elif not check_foreign(key, str(value), where.rstrip(":")):
            raise ConfigError(f"{where} unknown key{nearest(key, known, MISSPELT)}")
    return values


def _from_environment(options: Iterable[Option], environ: Mapping[str, str]) -> dict[str, object]:
    known = {option.env: option for option in options}
    values: dict[str, object] = {}
    for name in sorted(name for name in environ if name.startswith(ENV_PREFIX) and name != _CONFIG_ENV):
        if name not in known:
            raise ConfigError(f"{name}: unknown variable{nearest(name, known)}")
        values[known[name].key] = known[name].parse(environ[name], f"{name}:")
    return values


def _from_flags(command: str, options: Iterable[Option], flags: dict[str, str]) -> dict[str, object]:
    known = {option.field: option for option in options}
    if "model" in flags:
        if "model_path" in flags:
            raise ConfigError("MODEL and --model-path: give one of them")
        flags["model_path"] = flags.pop("model")
    values: dict[str, object] = {}
    for name, text in flags.items():
        if name in known:
            option = known[name]
            if not check_value(command, option.key, text, option.flag):
                values[option.key] = option.parse(text, option.flag)
        else:
            check_foreign(name, text, f"--{name}")
    return values


# ---------------------------------------------------------------- the parser


def _parse_flags(command: str, description: str, options: Sequence[Option], argv: Sequence[str]) -> dict[str, str]:
    if _HELP_ALL in argv:
        _make_parser(command, description, options, uses=("common", "rare")).print_help()
        raise SystemExit(0)
    parser = _make_parser(command, description, options, uses=("common",))
    found, unknown = parser.parse_known_args(list(argv))
    strange = next((text for text in unknown if is_flag(text)), None)
    if strange is not None:
        _refuse_flag(command, strange.split("=")[0], options)
    if unknown:
        raise ConfigError(f"{unknown[0]!r}: one MODEL is expected, and every other value after its flag")
    return {name: str(value) for name, value in vars(found).items()}


def _refuse_flag(command: str, flag: str, options: Sequence[Option]) -> NoReturn:
    name = flag.lstrip("-")
    if name in REFUSED or name in RENAMED:
        check_foreign(name, "", flag)
    if name in ACCEPTED or name in ALIASES:  # with one dash
        raise ConfigError(f"{flag}: is written --{name} here")
    for option in options:
        if option.key == name:
            raise ConfigError(f"{flag}: {advice_elsewhere(command, name, option.commands)}")
    flags = [option.flag for option in options if _has_flag(option, command)]
    near = nearest(flag, [*flags, "--config", "--dump-config", _HELP_ALL], MISSPELT)
    raise ConfigError(f"{flag}: unknown flag{near or f'; `deltaserve {command} {_HELP_ALL}` lists those there are'}")


def _has_flag(option: Option, command: str) -> bool:
    return not option.commands or command in option.commands


def _make_parser(command: str, description: str, options: Sequence[Option], uses: Sequence[str]) -> LineParser:
    """Knows every flag of the command; its help lists those of these uses."""
    own = [option for option in options if _has_flag(option, command)]
    num_left_out = sum(option.use not in uses for option in own)
    parser = LineParser(f"deltaserve {command}", description, _EPILOG)
    parser.argument_default = argparse.SUPPRESS
    parser.usage = f"deltaserve {command} MODEL [options]"
    parser.add_argument("model", nargs="?", metavar="MODEL", action=_Once, help="folder of a checkpoint, or GGUF file")
    files = parser.add_argument_group("configuration")
    files.add_argument("--config", action=_Once, metavar="FILE", help="YAML file of options, named as the flags are")
    files.add_argument("--dump-config", action=_Once, nargs=0, help="print the settings as YAML and end")
    more = f"as --help, with {num_left_out} flags more that are seldom needed" if num_left_out else "this help"
    files.add_argument(_HELP_ALL, action="store_true", help=more)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in own:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_option(groups[option.group], option, describe(option) if option.use in uses else argparse.SUPPRESS)
    for alias, key in ALIASES.items():
        for option in own:
            if option.key == key:
                parser.add_argument(f"--{alias}", dest=option.field, action=_Once, help=argparse.SUPPRESS)
    for name in ACCEPTED:
        nargs = 0 if name in SWITCHES else None
        parser.add_argument(f"--{name}", dest=name, action=_Once, nargs=nargs, help=argparse.SUPPRESS)
    return parser


def _add_option(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    text = text.replace("%", "%%")
    if option.is_switch:
        group.add_argument(option.flag, dest=option.field, action=_Once, nargs=0, help=text)
        return
    group.add_argument(option.flag, dest=option.field, action=_Once, metavar=option.metavar, help=text)


def describe(option: Option) -> str:
    """What it does, and where that is no list of words, what it may be and is."""
    if option.is_switch:
        return option.help
    notes = [] if option.choices or option.is_free_text else [option.allowed]
    notes += [] if option.default is None else [f"default {option.default}"]
    return f"{option.help} ({'; '.join(notes)})" if notes else option.help


_EPILOG = f"""
Every flag is also a key of the YAML file (page-size: 64) and a variable ({ENV_PREFIX}PAGE_SIZE=64).
A flag wins over a variable, a variable over the file, the file over the default.
Secrets are read from files only. Wrong input ends with one line on stderr and exit code 2.
"""
