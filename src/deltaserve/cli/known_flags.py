"""The flags that a command with settings knows: ours, those of every command, and those of other servers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from deltaserve.cli.foreign import FOREIGN, Alias, Takes, key_of
from deltaserve.cli.foreign_values import PAIR
from deltaserve.cli.options import Option, nearest_flag, read_options

CONFIG, DUMP, HELP_ALL = "config", "dump-config", "help-all"
HELP = ("help", "h")
OF_ANY_COMMAND: Mapping[str, Takes] = MappingProxyType(
    {CONFIG: Takes.ONE, DUMP: Takes.NOTHING, HELP_ALL: Takes.NOTHING, **dict.fromkeys(HELP, Takes.NOTHING)}
)


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
            return Takes.NOTHING if option.is_switch else Takes.ONE
        row = FOREIGN.get(name)
        return None if row is None else row.takes

    def nearest(self, name: str) -> str:
        """`; did you mean X?`, of what would be taken; or nothing."""
        own = [key for key, option in self.options.items() if self.has(option)]
        aliases = [row.name for row in FOREIGN.values() if isinstance(row.meaning, Alias) and row.meaning.key in own]
        return nearest_flag(name, [*own, *OF_ANY_COMMAND, *aliases])


@cache
def known_flags(command: str) -> KnownFlags:
    """Of a command with settings."""
    return KnownFlags(command, {option.key: option for option in read_options()})
