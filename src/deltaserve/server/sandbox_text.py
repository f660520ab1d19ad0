"""String methods as templates may use them: what they would make is known before they make it."""

import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import markupsafe
from jinja2.exceptions import SecurityError

from deltaserve.server.template_work import MAX_STRING_CHARS, Steps, TooMuchWork

_NAMES = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric
    isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
METHODS = frozenset(_NAMES.split())
"""`format` goes its own way; expandtabs and translate make a long string of a short one; encode makes bytes."""
MAX_PIECES = 200_000
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
_QUADRATIC = frozenset({"lstrip", "rstrip", "strip", "rfind", "rindex", "rpartition", "rsplit"})
"""They may compare every character of the text with every one of the argument."""
_MAX_PAIRS = 1 << 28
_MAX_WIDTH = 999
_NOTHING: Mapping[str, Any] = {}
_FIELD_DIGITS = len(str(_MAX_WIDTH))


def call_method(
    steps: Steps, owner: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING
) -> Any:
    """The result of a method of METHODS."""
    name = method.__name__
    if name == "replace":
        return replace(steps, owner, *args, **kwargs)
    if name == "join":
        return join(steps, args[0], owner)
    if name in _QUADRATIC and len(owner) * sum(len(a) for a in args if isinstance(a, str)) > _MAX_PAIRS:
        raise TooMuchWork(f"{name} by a string this long")
    if name in _SPLITTING:
        _check_pieces(name, owner, *args[:1], **kwargs)
    return method(*args, **kwargs)


def _check_pieces(name: str, owner: str, sep: object = None, **_: object) -> None:
    """How many strings would be made; where only doing it tells, words and lines are taken to be long."""
    is_known = name != "splitlines" and isinstance(sep, str) and sep != ""
    num_pieces = owner.count(str(sep)) if is_known else len(owner) // 32
    if num_pieces > MAX_PIECES:
        raise TooMuchWork(f"{num_pieces} pieces of a string")


def replace(steps: Steps, whole: str, old: str, new: str, count: int | None = None) -> str:
    """str.replace, as method and as filter."""
    steps.grow(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def join(steps: Steps, values: Iterable[object], separator: str = "") -> str:
    """str.join, as method and as filter; `values` were weighed."""
    parts = [str(value) for value in values]
    steps.grow(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def indent(steps: Steps, whole: str, prefix: str, first: bool, blank: bool) -> str:
    """Jinja's filter: every line but the first, and no empty one, unless told."""
    _check_pieces("splitlines", whole)
    lines = f"{whole}\n".splitlines()
    steps.grow(len(whole) + len(prefix) * len(lines))
    rest = [prefix + line if line or blank else line for line in lines[1:]]
    return "\n".join([prefix + lines[0] if first else lines[0], *rest])


def escape(steps: Steps, whole: str) -> str:
    """As HTML wants it."""
    steps.grow(len(whole) + 4 * sum(whole.count(char) for char in "&<>'\""))
    return str(markupsafe.escape(whole))


def checked_format(function: Callable[..., str], pattern: str, *args: Any, **kwargs: Any) -> str:
    """`str.format` without widths of thousands, nor widths that are values themselves."""
    specs = [spec or "" for _, name, spec, _ in string.Formatter().parse(pattern) if name is not None]
    for spec in specs:
        if "{" in spec or any(len(digits) > _FIELD_DIGITS for digits in _digits(spec)):
            raise SecurityError("a format this wide is not allowed")
    steps = Steps()
    widest = _MAX_WIDTH + sum(steps.weigh(value) for value in (*args, *kwargs.values()))
    if len(pattern) + len(specs) * widest > MAX_STRING_CHARS:
        raise TooMuchWork("a format this long")
    return function(*args, **kwargs)


def _digits(spec: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in spec).split()
