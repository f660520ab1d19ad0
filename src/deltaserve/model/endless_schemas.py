"""Schemas that no finite value satisfies: what they require holds itself again. llguidance draws them without an end,
up to its limits, so they are told apart before anything is drawn."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from deltaserve.model.grammar_schemas import GrammarSchema, Part, inner_of

_OTHERS = frozenset({"string", "number", "integer", "boolean", "null"})
_ALL = _OTHERS | {"object", "array"}
ENDLESS = "no text of finite length satisfies it: what it requires holds itself again"


def endless_schema(schema: GrammarSchema) -> str | None:
    """Why nothing finite satisfies it; None: something does, or it is left to who compiles it."""
    if not isinstance(schema.root, dict) or not any("$ref" in part for part in schema.parts):
        return None
    return None if id(schema.root) in _Ends(schema).found else ENDLESS


class _Ends:
    """Parts of a schema that a finite value satisfies, found from those that need no other part on: a part is looked
    at again whenever one that stands in it is found, so that a long chain is no more than its links."""

    def __init__(self, schema: GrammarSchema) -> None:
        self._schema = schema
        self.found: set[int] = set()
        needed_by: defaultdict[int, list[Part]] = defaultdict(list)
        for outer in schema.parts:
            for inner in self._inner(outer):
                needed_by[id(inner)].append(outer)
        waiting: list[Part] = [*schema.parts]
        while waiting:
            part = waiting.pop()
            if id(part) not in self.found and self._is_met(part):
                self.found.add(id(part))
                waiting += needed_by[id(part)]

    def _inner(self, part: Part) -> Iterator[Any]:
        yield from inner_of(part)
        if "$ref" in part:
            yield self._schema.target_of(part["$ref"])

    def _ends(self, value: Any) -> bool:
        """Whether a part does, as far as is known. What is no schema is refused, or allowed, by who compiles it."""
        return not isinstance(value, dict) or id(value) in self.found

    def _is_met(self, part: Part) -> bool:
        if "$ref" in part and not self._ends(self._schema.target_of(part["$ref"])):
            return False
        if not all(map(self._ends, _listed(part, "allOf"))):
            return False
        if not all(any(map(self._ends, _listed(part, way))) for way in ("anyOf", "oneOf") if _listed(part, way)):
            return False
        if "const" in part or "enum" in part:
            return True
        beside = [part, *(each for each in _listed(part, "allOf") if isinstance(each, dict))]
        kinds = _ALL.intersection(*map(_kinds, beside))
        return not kinds or any(self._has(kind, beside) for kind in kinds)

    def _has(self, kind: str, beside: list[Part]) -> bool:
        """Whether there is a finite value of this kind."""
        if kind in _OTHERS:
            return True
        return all(map(self._object_ends if kind == "object" else self._array_ends, beside))

    def _object_ends(self, part: Part) -> bool:
        properties, others = _mapping(part, "properties"), part.get("additionalProperties", True)
        patterns = _mapping(part, "patternProperties")
        required = part.get("required")
        for name in required if isinstance(required, list) else ():
            if not self._ends(properties.get(name, True if patterns else others)):
                return False
        if not required and _count(part, "minProperties"):
            return any(map(self._ends, [*properties.values(), *patterns.values(), others]))
        return True

    def _array_ends(self, part: Part) -> bool:
        least, first = _count(part, "minItems"), _listed(part, "prefixItems")
        is_met = all(map(self._ends, first[:least]))
        return is_met and (least <= len(first) or self._ends(part.get("items", True)))


def _kinds(part: Part) -> frozenset[str]:
    given = part.get("type")
    if isinstance(given, str):
        return frozenset({given})
    return frozenset(kind for kind in given if isinstance(kind, str)) if isinstance(given, list) else _ALL


def _listed(part: Part, keyword: str) -> list[Any]:
    value = part.get(keyword)
    return value if isinstance(value, list) else []


def _mapping(part: Part, keyword: str) -> Mapping[str, Any]:
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}


def _count(part: Part, keyword: str) -> int:
    value = part.get(keyword)
    return int(value) if isinstance(value, int | float) and 0 < value < 1 << 30 else 0
