"""JSON as a server may trust it: one reading only, bounded depth and numbers, Unicode without lone surrogates."""

import json
import math
import re
from collections.abc import Iterable

from deltaserve.server.errors import ApiError

MAX_DEPTH = 32
MAX_PARTS = 1_000_000
"""Strings, and ends of objects and arrays. A long conversation has a thousand; numbers, as in a prompt of ids, do not
count. What a body of a few bytes a part makes of itself in memory would stop every other request for seconds."""
MAX_INT_DIGITS = 20

# A whole string literal (so that brackets inside it do not count), or a bracket. Possessive: no backtracking, no stack.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{\]}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises ApiError 400 `invalid_json` where two parsers may differ."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise _invalid("the body starts with a byte order mark")
    _check_structure(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 at byte {error.start}") from error
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    if _SURROGATE_ESCAPE.search(body):
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    return value


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)


def _check_structure(body: bytes) -> None:
    depth = 0
    for number, match in enumerate(_STRUCTURE.finditer(body)):
        if number == MAX_PARTS:
            raise _invalid(f"the body has more than {MAX_PARTS} strings, arrays and objects")
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _invalid(f"the body nests deeper than {MAX_DEPTH}")
        elif first in b"]}":
            depth -= 1


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _invalid("an object of the body names a key twice")
    return result


def _constant(name: str) -> object:
    raise _invalid(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) - digits.startswith("-") > MAX_INT_DIGITS:
        raise _invalid(f"an integer has more than {MAX_INT_DIGITS} digits")
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_integer, parse_float=_number)


def _check_surrogates(value: object) -> None:
    for text in _strings(value):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _invalid("a string holds a lone surrogate") from error


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
