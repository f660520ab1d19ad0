"""Lines that start deltaserve, as charts, compose files and units have them, taken apart by its own parser."""

from collections.abc import Mapping, Sequence

from deltaserve.cli.dispatch import COMMANDS
from deltaserve.settings.config import Settings
from deltaserve.settings.flags.merge import load

NOWHERE: Mapping[str, str] = {}


def settings_of(argv: Sequence[str], environ: Mapping[str, str] = NOWHERE) -> Settings:
    """What `deltaserve argv` would run with. Raises ConfigError for a flag, a value or two that do not go together;
    AssertionError for one that is accepted and changes nothing."""
    command, *words = argv
    assert COMMANDS[command].has_settings, command
    line = load(command, COMMANDS[command].summary, words, environ)
    assert not line.notes
    return line.settings
