"""Least numbers of members that llguidance follows too loosely, found in a schema before it is compiled."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from deltaserve.model.grammar_schemas import GrammarSchema, Part

_MOST_WORK, _OF_A_STEP = 400_000, 10
"""Schemas that are passed on the way to what holds together, and as many of them as a step takes: some tenths of a
second."""
Together = Sequence[Part]
"""Schemas, without alternatives, that all hold for one value."""


def loose_count(schema: GrammarSchema) -> str | None:
    """What of a schema would be allowed though it excludes it, in words; None: nothing of this kind.

    llguidance 1.9 counts a name that stands in an object twice as two. Names that must be there it does not allow
    twice, and one more name is one more: so this is about `minProperties` that asks for two more or above.
    """
    if all(_least(part) < 2 for part in schema.parts):
        return None
    if not schema.is_followed:
        return next((_told(part) for part in schema.parts if _may_repeat([part])), None)
    try:
        return next((_told(max(each, key=_least)) for each in _all_together(schema) if _may_repeat(each)), None)
    except _TooMany:
        return "minProperties is not supported among that many alternatives"


class _TooMany(Exception):
    """Schemas that hold together are too many to be looked at."""


def _all_together(schema: GrammarSchema) -> Iterator[Together]:
    """What holds for each value in a value that the schema allows. Raises _TooMany."""
    places: list[Sequence[Any]] = [[schema.root]]
    seen: set[frozenset[int]] = set()
    work_left = _MOST_WORK
    while places:
        place = places.pop()
        if (key := frozenset(map(id, place))) in seen:
            continue
        seen.add(key)
        for work, together in _alternatives(place, schema):
            work_left -= work
            if work_left < 0:
                raise _TooMany
            if together is not None:
                yield together
                places += _places_in(together)


def _alternatives(place: Sequence[Any], schema: GrammarSchema) -> Iterator[tuple[int, Together | None]]:
    """The ways in which a value may satisfy all schemas of a place. Says before each step what it takes."""
    paths: list[tuple[list[Any], Together]] = [([*place], [])]
    while paths:
        waiting, taken = paths.pop()
        yield _OF_A_STEP + len(waiting) + len(taken), None if waiting else taken
        if not waiting or waiting[0] is False:
            continue
        first, rest = waiting[0], waiting[1:]
        if not isinstance(first, dict) or any(part is first for part in taken):
            paths.append((rest, taken))
            continue
        rest += _listed(first.get("allOf"))
        if "$ref" in first:
            rest.append(schema.target_of(first["$ref"]))
        branches = [_listed(first[keyword]) for keyword in ("anyOf", "oneOf") if keyword in first]
        yield math.prod(map(len, branches)) * (len(rest) + len(taken) + 1), None
        paths += [([*rest, *chosen], [*taken, first]) for chosen in product(*branches)]


def _places_in(together: Together) -> list[Sequence[Any]]:
    """Schemas that hold for each member and each item."""
    found: dict[tuple[str, object], list[Any]] = defaultdict(list)
    for part in together:
        for keyword in ("properties", "patternProperties"):
            inner = part.get(keyword)
            for name, schema in inner.items() if isinstance(inner, dict) else ():
                found[keyword, name].append(schema)
        for place, schema in enumerate(_listed(part.get("prefixItems"))):
            found["prefixItems", place].append(schema)
        for keyword in ("items", "additionalItems", "additionalProperties"):
            for place, schema in enumerate(_listed(part.get(keyword, True))):
                found[keyword, place].append(schema)
    return [*found.values()]


def _may_repeat(together: Together) -> bool:
    """Whether members that are not listed may stand for two of those that there must be."""
    required = {name for part in together for name in _listed(part.get("required")) if isinstance(name, str)}
    least = max(map(_least, together), default=0)
    most = min((_number(part.get("maxProperties"), least) for part in together), default=least)
    return (
        least - len(required) >= 2
        and most >= max(least, len(required))
        and all(map(_may_be_object, together))
        and not any(
            part.get("additionalProperties") is False and not part.get("patternProperties") for part in together
        )
    )


def _may_be_object(part: Part) -> bool:
    """Whether it may be one of any members; the members of constants are all listed."""
    kinds = part.get("type", "object")
    return "object" in _listed(kinds) and not {"const", "enum"} & part.keys()


def _least(part: Part) -> int:
    return _number(part.get("minProperties"), 0)


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _told(part: Part) -> str:
    return f"minProperties {_least(part)} is not supported here: one name could stand for several"


def _listed(value: Any) -> list[Any]:
    """No value is none, one is itself."""
    return value if isinstance(value, list) else [] if value is None else [value]
