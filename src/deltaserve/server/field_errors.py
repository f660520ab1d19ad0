"""What a client is told of a field that has the wrong type or value: one line, with the value and what is expected."""

import json
import re
from collections.abc import Iterable, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deltaserve.server.api_errors import ApiError, invalid, missing

_SHOULD = "Input should be "
_KINDS = {
    "string_type": "a string",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "extra_forbidden": "no field of this name",
}
"""pydantic's name of an error |-> what JSON calls that which was expected."""
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_SHOWN_CHARS = 40
_UNION_MEMBER = re.compile(r"str|bool|int|float|list\[.*|dict\[.*|literal\[.*|[A-Z]\w+")
"""What pydantic adds to the path of an error inside a union: not a field name."""


def first_error(error: ValidationError) -> ApiError:
    """400 about the first field that is wrong."""
    errors = error.errors(include_url=False, include_context=False)
    # A value that may be of two types has an error for each: the one further inside is of the type that was meant.
    first = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    param = _path(first["loc"])
    if first["type"] == "missing":
        return missing(param)
    wanted = dict.fromkeys(_wanted(each) for each in errors if _path(each["loc"]) == param)
    if None in wanted:
        return invalid(param, f"{param}: {first['msg'][:200]}")
    return invalid(param, f"{param} is {shown(first['input'])}, expected {listed([*map(str, wanted)], 'or')}"[:300])


def listed(words: Sequence[str], last: str = "and") -> str:
    """Words as a sentence lists them; `last` stands before the last one."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def only(words: Sequence[str]) -> str:
    """`only a is`, `only a and b are`: what a refusal says of what it would take."""
    return f"only {listed(words)} {'is' if len(words) == 1 else 'are'}"


def _wanted(error: ErrorDetails) -> str | None:
    """None where the library says something else than what it expects."""
    message = error["msg"]
    if error["type"] in _KINDS:
        return _KINDS[error["type"]]
    if not message.startswith(_SHOULD):
        return None
    return ("a value " if error["type"] in _BOUNDS else "") + message.removeprefix(_SHOULD)


def shown(value: object) -> str:
    """A value of JSON in a few words."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return f"a string of {len(value)} characters"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _SHOWN_CHARS else f"a number of {len(text)} digits"


def _path(loc: Iterable[int | str]) -> str:
    """('messages', 0, 'content', 'str') -> messages[0].content"""
    path = ""
    for part in loc:
        if isinstance(part, str) and _UNION_MEMBER.fullmatch(part):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:80]
