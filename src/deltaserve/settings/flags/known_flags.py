"""The flags that a command with settings knows: ours, those of every command, and those of other servers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from deltaserve.settings.flags.foreign import FOREIGN, SHORTEST_IN_FILES, Alias, Takes, key_of
from deltaserve.settings.flags.foreign_values import PAIR
from deltaserve.settings.flags.options import Option, nearest_flag, read_options

CONFIG, DUMP, HELP_ALL = "config", "dump-config", "help-all"
HELP = ("help", "h")
OF_ANY_COMMAND: Mapping[str, Takes] = MappingProxyType(
    {CONFIG: Takes.ONE, DUMP: Takes.NOTHING, HELP_ALL: Takes.NOTHING, **dict.fromkeys(HELP, Takes.NOTHING)}
)
_OF_A_LINE: Mapping[str, str] = MappingProxyType(
    {
        CONFIG: f"one file holds all settings and names no other; --{CONFIG} or DELTASERVE_CONFIG says which",
        DUMP: f"only a command line has it; write --{DUMP}",
        **dict.fromkeys((HELP_ALL, *HELP), f"only a command line has it; write --{HELP[0]} or --{HELP_ALL}"),
    }
)
"""Flags that are no settings |-> what is said of a key or a variable of that name."""


@dataclass(frozen=True, slots=True)
class KnownFlags:
    """All options by key, and which of them are flags of this command."""

    command: str
    options: Mapping[str, Option]

    def has(self, option: Option) -> bool:
        """Whether it is a flag of this command, not of others only."""
        return not option.commands or self.command in option.commands

    def is_of_pair(self, name: str) -> bool:
        """Whether it names workers of a router as SGLang's does."""
        return self.command == "router" and name in PAIR

    def takes(self, name: str) -> Takes | None:
        """What follows this flag; None: nobody knows it."""
        if name in OF_ANY_COMMAND:
            return OF_ANY_COMMAND[name]
        if self.is_of_pair(name):
            return Takes.SEVERAL
        option = self.options.get(key_of(name))
        if option is not None:
            several = Takes.SEVERAL if option.is_list_of_names else Takes.ONE
            return Takes.NOTHING if option.is_switch else several
        row = FOREIGN.get(name)
        return None if row is None else row.takes

    def nearest(self, name: str) -> str:
        """`; did you mean --X?`, of what this command would take; or nothing."""
        own = [key for key, option in self.options.items() if self.has(option)]
        names = [*own, *OF_ANY_COMMAND, *_aliases(own)]
        return nearest_flag(name, [f"--{known}" for known in names])

    def nearest_key(self, name: str) -> str:
        """The key of a file most like `name`, among settings of all commands."""
        return nearest_flag(name, [key for key in (*self.options, *_aliases(self.options)) if is_key(key)])


def advise_of_a_line(name: str) -> str | None:
    """What to do instead of giving `name` in a file or a variable; None: it is not a flag of a line alone."""
    if name in OF_ANY_COMMAND:
        return _OF_A_LINE[name]
    key = key_of(name)
    return f"a letter is a flag of a command line only; its key is {key}" if not is_key(name) and key != name else None


def is_key(name: str) -> bool:
    """Whether files and variables may have this name, not a command line alone."""
    return len(name) >= SHORTEST_IN_FILES


def _aliases(keys: Collection[str]) -> list[str]:
    return [row.name for row in FOREIGN.values() if isinstance(row.meaning, Alias) and row.meaning.key in keys]


@cache
def known_flags(command: str) -> KnownFlags:
    """What `command`, one with settings, accepts."""
    return KnownFlags(command, {option.key: option for option in read_options()})
