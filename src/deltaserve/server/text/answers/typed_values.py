"""Arguments that a format writes without JSON's types: the schema says what a text stands for."""

import json
from collections.abc import Iterator, Mapping

import msgspec

Schema = Mapping[str, object]
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_MAX_STEPS = 64
"""References and alternatives that are followed for one value."""


def json_text(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def typed(text: str, key: str, schema: Schema) -> str:
    """JSON of the argument `key`, which the model wrote as `text`. What is JSON of a type that is allowed is passed on
    as it is; anything else is a string."""
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, dict) else None
    kinds = _kinds(own, schema) if isinstance(own, dict) else set()
    bare = text.strip()
    if kinds == {"string"}:
        return json_text(text)
    if kinds and "string" in kinds:  # it may be null, or nothing but a text
        return "null" if "null" in kinds and bare in ("null", "None") else json_text(text)
    bare = _PYTHON.get(bare, bare)
    return bare if is_json(bare) else json_text(text)


def kinds_of(schema: object, root: Schema) -> set[str]:
    """JSON types that a schema allows; empty: it does not say."""
    return _kinds(schema, root) if isinstance(schema, dict) else set()


def is_text(schema: Schema, root: Schema) -> bool:
    """Whether a value may be a text, so that a model writes it without quotes."""
    return "string" in _kinds(schema, root)


def texts_of(schema: Schema, root: Schema) -> list[str]:
    """The texts that a value may be, where the schema lists them without alternatives."""
    parts = list(_parts(schema, root))
    listed = [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    listed += [[part["const"]] for part in parts if "const" in part]
    values = _listed(listed[0]) if len(listed) == 1 else []
    texts = [value for value in values if isinstance(value, str)]
    return texts if len(texts) == len(values) else []


def is_json(text: str) -> bool:
    """Whether it is JSON."""
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _kinds(schema: Schema, root: Schema) -> set[str]:
    """JSON types that a schema allows; empty: it does not say."""
    return {kind for part in _parts(schema, root) for kind in _own_kinds(part)}


def _parts(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schema, and what it refers to or has as alternatives."""
    waiting: list[object] = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        waiting += [target_of(part.get("$ref"), root)]
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(part.get(name))


def target_of(ref: object, root: Schema) -> object:
    """What `#/$defs/Name` stands for."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: object = root
    for step in ref[2:].split("/")[:_MAX_STEPS]:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _own_kinds(schema: Schema) -> Iterator[str]:
    yield from (kind for kind in _listed(schema.get("type")) if isinstance(kind, str))
    values = _listed(schema.get("enum", [])) + ([schema["const"]] if "const" in schema else [])
    yield from (_KINDS.get(type(value), "object") for value in values)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
