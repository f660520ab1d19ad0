"""Bounds of numbers that llguidance follows too loosely, found in a grammar before it is compiled."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_LARK_SCHEMA = re.compile(r"%json\s*")
_TOGETHER, _EACH = "allOf", ("anyOf", "oneOf")
Bounds = Mapping[str, float]


def loose_bound(grammar: str) -> str | None:
    """What of a grammar would be allowed though its schema excludes it, in words; None: nothing of this kind.

    llguidance 1.9 writes the numbers between two bounds of one integer part as digits behind that part, or none: so a
    whole number that is excluded as the bound nearer to zero is among them.
    """
    if "xclusiveM" not in grammar:
        return None
    return next((told for schema in _schemas_in(grammar) for told in _loose_in(schema)), None)


def _schemas_in(grammar: str) -> Iterator[Any]:
    try:
        parts = json.loads(grammar)["grammars"]
    except (ValueError, KeyError, TypeError):
        return  # it is refused by who compiles it
    for part in parts:
        if "json_schema" in part:
            yield part["json_schema"]
        for found in _LARK_SCHEMA.finditer(part.get("lark_grammar") or ""):
            try:
                yield json.JSONDecoder().raw_decode(part["lark_grammar"], found.end())[0]
            except ValueError:
                continue


def _loose_in(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            waiting += node.values()
            yield from filter(None, map(_loose, _merged(node)))
        elif isinstance(node, list):
            waiting += node


def _merged(node: Mapping[str, Any]) -> Iterator[Bounds]:
    """The bounds of a schema with those of its parts that hold together with it."""
    own = _bounds_of(node)
    for part in node.get(_TOGETHER) or ():
        own = {**_bounds_of(part), **own}
    yield own
    for keyword in _EACH:
        for part in node.get(keyword) or ():
            yield {**_bounds_of(part), **own}


def _bounds_of(node: Any) -> dict[str, float]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    given = {name: node.get(name) for name in names} if isinstance(node, dict) else {}
    return {name: v for name, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}


_ENDS = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)


def _loose(bounds: Bounds) -> str | None:
    for excluded, others, sign in _ENDS:
        value = bounds.get(excluded)
        if value is None or value * sign < 0 or value % 1:
            continue
        for other in others:
            if other in bounds and 0 < (bounds[other] - value) * sign < 1:
                return f"{excluded} {value:g} beside {other} {bounds[other]:g} is not supported: the bound is allowed"
    return None
