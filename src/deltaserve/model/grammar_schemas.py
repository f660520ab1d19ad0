"""The JSON schemas of a grammar, and the schemas in them: what is a schema there, and what only looks like one."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import msgspec

_LARK_SCHEMA = re.compile(r"%json\s*")
_OF_NAMES = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_OF_ONE_OR_SOME = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems"),
        *("contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    }
)
_MOST_UNREAD = 64
"""Places in Lark where `%json` is followed by none, as it may be in a text: an error looks through all that is before
it."""
_MOST_DIGITS = 300
_DECODER = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) <= _MOST_DIGITS else float(text))
"""Whole numbers of more digits than Python reads are no error to others."""
Part = Mapping[str, Any]
_END = "]}"
"""With which a grammar ends that has no other names than `grammars`."""


@dataclass(frozen=True)
class GrammarSchema:
    """One JSON schema of a grammar."""

    root: Any

    @cached_property
    def parts(self) -> Sequence[dict[str, Any]]:
        """Every schema in it that is an object. A constant or a default that looks like one is none, unless a reference
        names it. Where not all references can be followed, whatever is an object counts."""
        return self._reached if self.is_followed else [*_objects_in(self.root)]

    @cached_property
    def is_followed(self) -> bool:
        """Whether all of its references are pointers from its root that lead somewhere. Where a part has an address of
        its own, pointers may begin there."""
        has_address = any(
            isinstance(part.get(name), str) for part in self._reached for name in ("$id", "id") if part is not self.root
        )
        targets = [self.target_of(part["$ref"]) for part in self._reached if "$ref" in part]
        return not has_address and None not in targets

    @cached_property
    def _reached(self) -> Sequence[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        waiting = [self.root]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict) or id(part) in found:
                continue
            found[id(part)] = part
            waiting += inner_of(part)
            if "$ref" in part:
                waiting.append(self.target_of(part["$ref"]))
        return [*found.values()]

    def target_of(self, ref: object) -> Any:
        """What a reference stands for. None: it cannot be followed."""
        start, *steps = _steps_of(ref) if isinstance(ref, str) else [""]
        if start != "#" or "" in steps:
            return None
        found = self.root
        for step in steps:
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def inner_of(part: Part) -> Iterator[Any]:
    """The schemas that stand in one."""
    for keyword, value in part.items():
        if keyword in _OF_NAMES and isinstance(value, dict):
            yield from value.values()
        elif keyword in _OF_ONE_OR_SOME:
            yield from value if isinstance(value, list) else [value]


def schemas_in(grammar: str) -> Sequence[GrammarSchema]:
    """The JSON schemas of a grammar, those in its Lark among them. What cannot be read is refused by who compiles it:
    whatever it reads is read here."""
    found: list[GrammarSchema] = []

    def keep(root: Any) -> Any:
        found.append(GrammarSchema(root))
        return root

    with_schemas(grammar, keep)
    return found


def with_schemas(grammar: str, replace: Callable[[Any], Any], more: str = "") -> str:
    """The same grammar, each schema in it replaced; as it is where `replace` gives all of them back. `more`: JSON of
    one more part, behind the others. The text is parsed once, as it may be long. Raises ValueError for Lark that is no
    JSON behind `%json` again and again."""
    if "json" not in grammar:
        return _with_more(grammar, more)
    try:
        whole = _DECODER.decode(grammar)
    except ValueError:
        return grammar  # it is refused by who compiles it
    given = whole.get("grammars") if isinstance(whole, dict) else None
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        return grammar
    parts = [_with_schemas(part, replace) for part in given]
    is_new = any(part is not old for part, old in zip(parts, given, strict=True))
    text = json.dumps({**whole, "grammars": parts}, ensure_ascii=False) if is_new else grammar
    if more and parts and whole.keys() == {"grammars"} and text.endswith(_END):
        return f"{text.removesuffix(_END)}, {more}{_END}"
    return _with_more(text, more)


def _with_more(grammar: str, more: str) -> str:
    if not more:
        return grammar
    try:
        whole = msgspec.json.decode(grammar, type=dict[str, list[msgspec.Raw]])
        whole["grammars"].append(msgspec.Raw(more.encode()))
    except (msgspec.DecodeError, KeyError):
        return grammar  # it is refused by who compiles it
    return msgspec.json.encode(whole).decode()


def _with_schemas(part: Part, replace: Callable[[Any], Any]) -> Part:
    if "json_schema" in part:
        new = replace(part["json_schema"])
        return part if new is part["json_schema"] else {**part, "json_schema": new}
    lark = str(part.get("lark_grammar", ""))
    pieces, end, num_unread = [], 0, 0
    for found in _LARK_SCHEMA.finditer(lark):
        try:
            schema, schema_end = _DECODER.raw_decode(lark, found.end())
        except ValueError:
            num_unread += 1
            if num_unread > _MOST_UNREAD:
                raise
            continue
        new = replace(schema)
        if new is not schema:
            pieces += [lark[end : found.end()], json.dumps(new, ensure_ascii=False)]
            end = schema_end
    return {**part, "lark_grammar": "".join([*pieces, lark[end:]])} if pieces else part


def _objects_in(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def _steps_of(ref: str) -> list[str]:
    """The steps of a pointer; none where they depend on when it is decoded."""
    if "%2f" in ref.lower():
        return [""]
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(ref).split("/")]
