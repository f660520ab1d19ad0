"""The parser of commands with arguments of their own: flags of other servers mean there what they mean to `serve`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from deltaserve.core.errors import ConfigError
from deltaserve.settings.flags.foreign import FOREIGN, Denied, Idle, Takes, key_of
from deltaserve.settings.flags.line_words import Word, take_apart
from deltaserve.settings.flags.options import nearest, read_options
from deltaserve.settings.flags.problems import problems_of, raise_problems

_MODEL = "model"
"""A positional argument of this name is what --model-path is elsewhere."""


class LineParser(argparse.ArgumentParser):
    """All that is wrong is told at once, as ConfigErrors of one line; no abbreviations; help keeps its line breaks."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            message.removeprefix("argument ").replace("ignored explicit argument", "takes no value, leave out")
        )

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Everything must be known. Says on stderr what changes nothing. Raises ConfigError."""
        own = self._own_flags()
        rest: list[str] = []
        problems: list[str] = []
        for word in take_apart(argv, lambda name: _takes(name, own)):
            try:
                rest += self._sorted(word, own)
            except ConfigError as error:
                problems.append(str(error))
        try:
            found, unknown = self.parse_known_args(rest)
        except ConfigError as error:
            raise_problems([*problems, *problems_of(error)])
            raise
        problems += [f"{text!r}: not expected here; values come after their flags" for text in unknown[:1]]
        raise_problems(problems)
        return found

    def _own_flags(self) -> Mapping[str, Takes]:
        return {
            flag.lstrip("-"): _TAKES.get(action.nargs, Takes.SEVERAL)
            for flag, action in self._option_string_actions.items()
        }

    def _sorted(self, word: Word, own: Mapping[str, Takes]) -> Sequence[str]:
        """The words for argparse. Raises ConfigError for a flag that has no meaning here."""
        if not word.flag or word.name in own:
            return word.typed
        key = key_of(word.name)
        if key in own:
            return (f"--{key}", *word.values)
        if key == "model-path" and self._has_model():
            return word.values
        row = FOREIGN.get(word.name)
        match None if row is None else row.meaning:
            case Idle(why):
                print(f"{self.prog}: {word.flag} changes nothing: {why}", file=sys.stderr)
                return ()
            case Denied(remedy):
                raise ConfigError(f"{word.flag}: {remedy}")
        if key in {option.key for option in read_options()}:
            raise ConfigError(
                f"{word.flag}: no flag of {self.prog}; what runs a model has it, such as `deltaserve serve`"
            )
        raise ConfigError(f"{word.flag}: unknown flag{nearest(word.flag, self._option_string_actions)}")

    def _has_model(self) -> bool:
        return any(action.dest == _MODEL and not action.option_strings for action in self._actions)


_TAKES: Mapping[object, Takes] = {0: Takes.NOTHING, None: Takes.ONE, "?": Takes.ONE}


def _takes(name: str, own: Mapping[str, Takes]) -> Takes | None:
    if name in own:
        return own[name]
    row, key = FOREIGN.get(name), key_of(name)
    if key in own or key == "model-path":
        return own.get(key, Takes.ONE)
    return None if row is None else row.takes


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wide, and with the line breaks of descriptions."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=112)
