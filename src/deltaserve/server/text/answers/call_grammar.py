"""Grammars of answers, in llguidance's Lark: calls in the words of a format, behind reasoning, in place of content or
among it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from deltaserve.core.errors import DeltaserveError
from deltaserve.core.sampling import MAX_GRAMMAR_BYTES
from deltaserve.server.text.answers.answer_stream import Tools
from deltaserve.server.text.answers.typed_values import target_of

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_INNER = frozenset({"properties", "$defs", "definitions"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_LISTS = {"anyOf": "anyOf", "oneOf": "anyOf", "allOf": "allOf", "prefixItems": "prefixItems"}
_REFERENCES = ("#/$defs/", "#/definitions/")
_ROOT = "whole"
_JSON_FORM = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}
"""White space in JSON: one blank or none behind a comma or colon, as templates write calls. Were it free elsewhere,
what follows a literal would not be known from the literal on, and tokens that span both would be masked."""
_AS_CONTENT = {"whitespace_pattern": r"\x20"}
"""Where content may be JSON as well, which has white space anywhere: what a call is told by must be read alike."""
TEXT = "/(?s:.*)/"


class GrammarTooLarge(DeltaserveError):
    """What tools come to in the format of a model."""


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """What a grammar must know of a vocabulary."""

    control: Mapping[str, int]
    """Marker that is a control token |-> id. Other markers are text."""
    whole: Mapping[str, int]
    """Marker that is one token, control token or not |-> id."""
    ends: Sequence[int] = ()
    """Ids that end an answer."""
    spaces: Sequence[int] = ()
    """Ids that are white space alone: those that may stand before a marker."""

    def first(self, text: str) -> int | None:
        """The token that begins a marker. None: it begins with several."""
        return next((token for marker, token in self.whole.items() if text.startswith(marker)), None)


@dataclass(slots=True)
class CallGrammar:
    """Writes the rules of a grammar for one vocabulary."""

    tokens: MarkerTokens
    tools: Tools
    """Name that may be called |-> schema of the arguments, as they must be."""
    several: bool
    """Whether there may be more than one call."""
    most_reasoning: int | None = None
    """Most tokens of reasoning. None: any number."""
    beside_content: bool = False
    """Whether an answer may be content of a grammar in place of calls."""
    rules: list[str] = field(default_factory=list)
    json_len: int = 0
    """Characters of all schemas that were written so far, each as often as it was."""

    def literal(self, text: str) -> str:
        """This text, in which markers may stand."""
        return _literal(text, self.tokens.control)

    def marker(self, text: str) -> str:
        """A marker as its token, where it is one."""
        return _literal(text, self.tokens.whole)

    def reasoning_up_to(self, end: str) -> str:
        """Reasoning, up to and with the marker that ends it. One whose length is bounded counts tokens, so the marker
        must be one."""
        if self.most_reasoning is None:
            return self.up_to(end)
        marker = f"<[{self.tokens.whole[end]}]>"
        if self.most_reasoning == 0:
            return marker
        inside = any_token_but(self.tokens.ends, [self.tokens.whole[end], *self.tokens.control.values()])
        return f"{self.rule(f'{inside}{{0,{self.most_reasoning}}}')} {marker}"

    def json(self, schema: Mapping[str, object]) -> str:
        """JSON that satisfies a schema. Raises GrammarTooLarge before what many of them come to fills the memory."""
        form = _AS_CONTENT if self.beside_content else _JSON_FORM
        text = "%json " + json.dumps({**schema, "x-guidance": form}, ensure_ascii=False)
        self.json_len += len(text)
        if self.json_len > MAX_GRAMMAR_BYTES:
            raise GrammarTooLarge(f"a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
        return text

    def json_part(self, schema: object, root: Mapping[str, object]) -> str:
        """JSON that satisfies a part of a schema, whose references are to be looked up in the whole. What they lead to
        goes with it and no more: there may be a part for each name."""
        own = schema if isinstance(schema, dict) else {}
        if next(_references(own), None) is None:
            return self.json(own)
        return self.json({"$defs": {_ROOT: _rooted(_needed(own, root))}, **_as_object(_rooted(own))})

    def rule(self, body: str, options: str = "") -> str:
        """A rule of its own; its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """What a rule is, which had to be named before."""
        number = next(k for k, rule in enumerate(self.rules) if rule.startswith(f"{name}:"))
        self.rules[number] = f"{name}: {body}"

    def begin_of(self, begins: Sequence[str]) -> str:
        """The marker that the vocabulary has, of those that begin calls; the first where it has none."""
        return next((marker for marker in begins if marker in self.tokens.control), begins[0])

    def up_to(self, end: str) -> str:
        """Any text up to and with a marker, which does not stand in it. One of several tokens may have a control token
        in it."""
        for control, token in self.tokens.control.items():
            before, found, after = end.partition(control)
            if found:
                text = f"/(?s:.*){pattern_of(before)}/"
                return self.rule(" ".join(filter(None, (text, f"<[{token}]>", self.literal(after)))))
        return self.rule(TEXT, f"[suffix={self.literal(end)}]")

    def without(self, marker: str) -> str:
        """Any text in which a marker does not stand."""
        if any(control in marker for control in self.tokens.control):
            return TEXT
        return self.text_but(f"(?s:.*){pattern_of(marker)}(?s:.*)")

    def text_but(self, *patterns: str) -> str:
        """Any text that none of these patterns matches as a whole."""
        name = f"T{len(self.rules)}"
        self.rules.append(" & ~".join([f"{name}: {TEXT}", *(f"/{pattern}/" for pattern in patterns)]))
        return name

    def any_of(self, alternatives: Sequence[str]) -> str:
        """One of these."""
        return self.rule(" | ".join(alternatives))

    def one_json(self, before: str, behind_name: str, behind: str) -> str:
        """A call whose arguments are JSON, with these texts around name and arguments."""
        end = self.literal(behind)
        calls = [(self.literal(before + name + behind_name), self.json(schema)) for name, schema in self.tools.items()]
        return self.any_of([f"{head} {arguments} {end}" for head, arguments in calls])

    def members(self, schema: Mapping[str, object], write: Callable[[str, object], str], separator: str) -> str:
        """Arguments, each written as `write` writes a name and its schema: those that are required, then any others in
        the order of the schema."""
        properties, required = schema.get("properties"), schema.get("required")
        own = properties if isinstance(properties, dict) else {}
        written = {key: self.rule(write(key, each)) for key, each in own.items()}
        needed = [key for key in written if isinstance(required, list) and key in required]
        others = [written[key] for key in written if key not in needed]
        between = self.literal(separator)
        behind = [""]  # what may follow the others up to the last one, up to the one before it, ...
        for each in reversed(others):
            behind.append(self.rule(f"({between} {each})? {behind[-1]}"))
        if needed:
            return self.rule(f"{f' {between} '.join(written[key] for key in needed)} {behind[-1]}")
        if not others:
            return ""
        return self.any_of([f"{each} {behind[len(others) - 1 - k]}" for k, each in enumerate(others)]) + "?"

    def some(self, one: str, separator: str = "") -> str:
        """A call, or some of them."""
        return self.rule(f"{one} ({self.literal(separator)} {one})*") if self.several else one

    def text(self, start: str) -> str:
        """The grammar whose whole answer is `start`."""
        return "\n".join([f"start: {start}", *self.rules])


def pattern_of(text: str) -> str:
    """A pattern that matches this text."""
    return re.escape(text).replace("/", r"\/")


def any_token_but(*ids: Sequence[int]) -> str:
    """One token, any but these."""
    others = sorted({*chain.from_iterable(ids)})
    return f"<[^{','.join(map(str, others))}]>" if others else "<[*]>"


def _literal(text: str, known: Mapping[str, int]) -> str:
    for marker, token in known.items():
        before, found, after = text.partition(marker)
        if found:
            return " ".join(filter(None, (_literal(before, known), f"<[{token}]>", _literal(after, known))))
    return json.dumps(text, ensure_ascii=False) if text else ""


def _references(schema: object) -> Iterator[str]:
    """What a schema refers to, itself and in its parts."""
    if isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str):
        yield ref
    inner = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for each in inner:
        yield from _references(each)


def _needed(own: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object]:
    """The definitions of the whole that a part of it refers to, themselves and through others; the whole where it
    refers to anything else."""
    found: dict[str, dict[str, object]] = {}
    waiting: list[object] = [own]
    while waiting:
        for ref in _references(waiting.pop()):
            group, _, name = ref.removeprefix("#/").partition("/")
            name = name.partition("/")[0]
            defined = root.get(group)
            if not ref.startswith(_REFERENCES) or not isinstance(defined, dict) or name not in defined:
                return root
            known = found.setdefault(group, {})
            if name not in known:
                known[name] = defined[name]
                waiting.append(defined[name])
    return found


def _rooted(schema: object) -> object:
    """The same, its references to the root looked up in a definition."""
    if isinstance(schema, list):
        return list(map(_rooted, schema))
    if not isinstance(schema, dict):
        return schema
    found = {key: _rooted(value) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        found["$ref"] = f"#/$defs/{_ROOT}{ref[1:]}"
    return found


def _as_object(schema: object) -> dict[str, object]:
    assert isinstance(schema, dict), "it was one before"
    return schema


def loosened(schema: Mapping[str, object]) -> dict[str, object]:
    """The shape that a schema asks for, for who asked for no more than a call: types, names, lists of values. What a
    grammar may not be able to check, or is no schema, is left out."""
    return _loosened(schema, schema)


def _loosened(schema: Mapping[str, object], root: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in schema.items():
        if name in _INNER and isinstance(value, dict):
            found[name] = {key: _any_loosened(each, root) for key, each in value.items()}
        elif name in _SCHEMAS and isinstance(value, dict | bool):
            found[name] = _any_loosened(value, root)
        elif name in _LISTS and isinstance(value, list) and value:
            found[_LISTS[name]] = [_any_loosened(each, root) for each in value]
        elif _is_plain(name, value, root):
            found[name] = value
    return found


def _any_loosened(schema: object, root: Mapping[str, object]) -> object:
    return _loosened(schema, root) if isinstance(schema, dict) else schema is not False


def _is_plain(name: str, value: object, root: Mapping[str, object]) -> bool:
    """Whether a keyword is one that any grammar can check."""
    match name:
        case "type":
            kinds = value if isinstance(value, list) and value else [value]
            return all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        case "required":
            return isinstance(value, list) and all(isinstance(key, str) for key in value)
        case "enum":
            return isinstance(value, list) and bool(value)
        case "$ref":
            return isinstance(value, str) and value.startswith(_REFERENCES) and target_of(value, root) is not None
    return name == "const"
