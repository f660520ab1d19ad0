"""Names of members that llguidance follows too loosely: those that an object allows without listing them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from deltaserve.model.grammar_schemas import GrammarSchema, Part, with_schemas

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_OPTIONS, _ESCAPES, _ANY_ESCAPES = "x-guidance", "json_allowed_escapes", "json_allow_general_unicode_escapes"
_SHORT_ESCAPES = 'nrbtf\\"'
_FIRST_PLAIN, _DELETE = " ", "\x7f"
_REPLACED = frozenset({"additionalProperties", "patternProperties"})


def with_exact_names(grammar: str) -> str:
    """The same grammar, in which a listed name is itself however it is spelled.

    llguidance 1.9 allows as any other name what is not spelled like a listed one, and an escape (`\\u0061`) spells any
    character. Names that match a pattern are spelled in one way: so where unlisted names may have any value, a pattern
    that matches all of them stands for them. Where they have a schema of their own, or other patterns are there, which
    would have to be told from this one, the schema does without escapes of that kind, in texts, too.
    """
    return with_schemas(grammar, lambda root: exact_names(GrammarSchema(root)))


def exact_names(schema: GrammarSchema) -> Any:
    """The root of a schema in which a listed name is itself: the same object where it was so before. The schema's parts
    may be changed."""
    root = schema.root
    counts = any("minProperties" in part for part in schema.parts)
    listing = [part for part in schema.parts if part.get("additionalProperties") is not False and _lists(part, counts)]
    has_patterns = any(part.get("patternProperties") for part in schema.parts)
    is_plain = all(_is_plain(name) for part in schema.parts for name in _names_of(part))
    if not listing and (is_plain or not has_patterns):
        return root
    may_add_pattern = schema.is_followed and is_plain and not has_patterns and not _refers_to_unlisted(schema)
    if may_add_pattern and all(map(_allows_anything, listing)):
        for part in listing:
            part.update({"patternProperties": {"": {}}, "additionalProperties": False})
        return {**root}
    options = root.get(_OPTIONS, {})
    if not isinstance(options, dict):
        return root  # it is refused by who compiles it
    escapes = (options.get(_ESCAPES) or _SHORT_ESCAPES).replace("u", "")
    return {**root, _OPTIONS: {**options, _ESCAPES: escapes, _ANY_ESCAPES: False}}


def _lists(part: Part, counts: bool) -> bool:
    """Whether it makes a difference which name of a member is which. `counts`: also how many there are."""
    return bool(part.get("properties") or part.get("patternProperties") or (counts and part.get("required")))


def _allows_anything(part: Part) -> bool:
    """Whether members without a listed name may have any value."""
    others = part.get("additionalProperties", True)
    return others is True or (isinstance(others, dict) and others.keys() <= _ANNOTATIONS)


def _names_of(part: Part) -> Iterator[str]:
    properties, required = part.get("properties"), part.get("required")
    yield from properties if isinstance(properties, dict) else ()
    yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def _is_plain(name: str) -> bool:
    """Whether a pattern matches it in one spelling only: control characters have two."""
    return all(character >= _FIRST_PLAIN and character != _DELETE for character in name)


def _refers_to_unlisted(schema: GrammarSchema) -> bool:
    """Whether a reference leads to what is about to be replaced, or through it."""
    refs = (unquote(part["$ref"]) for part in schema.parts if "$ref" in part)
    return any(_REPLACED & {*ref.split("/")} for ref in refs)
