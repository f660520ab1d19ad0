"""A command line taken apart: each flag with what follows it, before anybody asks what it means."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deltaserve.settings.flags.foreign import Takes

_NUMBER = re.compile(r"-\.?[0-9]")


@dataclass(frozen=True, slots=True)
class Word:
    """A flag and its values, or a value that follows no flag."""

    flag: str
    """The flag as it was typed, without what follows `=`; empty: a value alone."""
    name: str
    """The flag as a key: without dashes before it, and with dashes within it."""
    values: tuple[str, ...]
    typed: tuple[str, ...]
    """All of it, as it was typed."""


def take_apart(argv: Sequence[str], takes: Callable[[str], Takes | None]) -> Iterator[Word]:
    """`takes`: what follows the flag of this name; None: nobody knows it, then all that is no flag follows it."""
    at = 0
    while at < len(argv):
        text = argv[at]
        if not is_flag(text):
            yield Word("", "", (text,), (text,))
            at += 1
            continue
        flag, equals, value = text.partition("=")
        name = _name(flag, takes)
        count = 0 if equals else _num_values(takes(name), argv[at + 1 :])
        values = tuple(argv[at + 1 : at + 1 + count])
        yield Word(flag, name, (value,) if equals else values, (text, *values))
        at += 1 + count


def is_flag(text: str) -> bool:
    """Whether a text is a flag and not a value: `-1` and `-.5` are numbers."""
    return text.startswith("-") and len(text) > 1 and not _NUMBER.match(text)


def _name(flag: str, takes: Callable[[str], Takes | None]) -> str:
    """`--max_model_len` is written so too, and `--kv-transfer-config.kv_role` sets a part of another flag's value; a
    few names have a dot of their own (`--fim-qwen-1.5b-default`)."""
    name = flag.lstrip("-").replace("_", "-")
    return name.partition(".")[0] if takes(name) is None else name


def _num_values(takes: Takes | None, rest: Sequence[str]) -> int:
    following = next((at for at, text in enumerate(rest) if is_flag(text)), len(rest))
    if takes is Takes.NOTHING:
        return 0
    return min(following, 1) if takes is Takes.ONE else following
