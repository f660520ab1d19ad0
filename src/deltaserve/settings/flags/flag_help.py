"""What `--help` and `--help-all` of a command with settings print."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.settings.flags.line_parser import HelpFormatter
from deltaserve.settings.flags.options import ENV_PREFIX, Option


@dataclass(frozen=True, slots=True)
class About:
    """What help says of a command beside its flags."""

    summary: str = ""
    epilog: str = ""
    """An example, and the exit codes."""


def print_help(command: str, about: About, options: Sequence[Option], uses: Sequence[str]) -> None:
    """`options`: those of the command; listed are those of these uses."""
    num_left_out = sum(option.use not in uses for option in options)
    parser = argparse.ArgumentParser(
        prog=f"deltaserve {command}",
        usage=f"deltaserve {command} MODEL [options]",
        description=about.summary,
        epilog=f"{_SOURCES}\n{about.epilog}",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder of a checkpoint, or GGUF file")
    files = parser.add_argument_group("configuration")
    files.add_argument("--config", metavar="FILE", help="YAML file of options, named as the flags are")
    files.add_argument("--dump-config", action="store_true", help="print the settings as YAML and end")
    more = f"as --help, with {num_left_out} flags more that are seldom needed" if num_left_out else "this help"
    files.add_argument("--help-all", action="store_true", help=more)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_option(groups[option.group], option, describe(option) if option.use in uses else argparse.SUPPRESS)
    parser.print_help()


def _add_option(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    text = text.replace("%", "%%")
    if option.is_switch:
        group.add_argument(option.flag, action="store_true", help=text)
        return
    group.add_argument(option.flag, metavar=option.metavar, help=text)


def describe(option: Option) -> str:
    """What it does, and where that is no list of words, what it may be and is."""
    if option.is_switch:
        return option.help
    notes = [] if option.choices or option.is_free_text else [option.allowed]
    notes += [] if option.default is None else [f"default {option.default}"]
    return f"{option.help} ({'; '.join(notes)})" if notes else option.help


_SOURCES = f"""
Every flag is also a key of the YAML file (page-size: 64) and a variable ({ENV_PREFIX}PAGE_SIZE=64).
A flag wins over a variable, a variable over the file, the file over the default.
Flags of SGLang, vLLM, Dynamo and llama.cpp that mean the same are taken as they are.
Secrets are read from files only. Wrong options end with a line for each, and exit code 2.
"""
