"""Bounds of numbers that llguidance follows too loosely, found in a schema before it is compiled."""

from collections.abc import Iterator, Mapping
from typing import Any

from deltaserve.model.grammar_schemas import GrammarSchema

_TOGETHER, _EACH = "allOf", ("anyOf", "oneOf")
Bounds = Mapping[str, float]


def loose_bound(schema: GrammarSchema) -> str | None:
    """What of a schema would be allowed though it excludes it, in words; None: nothing of this kind.

    llguidance 1.9 writes the numbers between two bounds of one integer part as digits behind that part, or none: so a
    whole number that is excluded as the bound nearer to zero is among them.
    """
    if not any("exclusiveMinimum" in part or "exclusiveMaximum" in part for part in schema.parts):
        return None
    found = (told for part in schema.parts for bounds in _merged(part) if (told := _loose(bounds)) is not None)
    return next(found, None)


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
