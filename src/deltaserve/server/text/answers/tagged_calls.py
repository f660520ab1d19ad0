"""Calls written in tags: a name, and a tag for each argument, whose text is as the schema says."""

from dataclasses import dataclass

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.typed_values import Schema, is_text, json_text, texts_of, typed

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the parts of a call."""

    begin: str
    """Before the name."""
    name_end: str
    argument: str
    """Before the name of an argument."""
    argument_name_end: str
    argument_end: str
    end: str
    on_own_lines: bool
    """A line break stands before and behind each value."""


def read_tagged_call(stream: AnswerStream, tags: Tags) -> Wait[bool]:
    """Say the call that begins here. False: it is none, and some of it was read."""
    if not (yield from stream.accept(tags.begin)):
        return False
    named = yield from stream.until(tags.name_end, most=_MAX_NAME)
    if named is None or named[0] not in stream.tools:
        return False
    stream.begin_call(named[0])
    schema, before = stream.tools[named[0]], "{"
    line = "\n" if tags.on_own_lines else ""
    while True:
        yield from stream.skip()
        if (yield from stream.accept(tags.end)):
            stream.arguments("{}" if before == "{" else "}")
            return True
        if not (yield from stream.accept(tags.argument)):
            return True  # malformed: what follows is content, and the arguments have no end
        key = yield from stream.until(tags.argument_name_end, most=_MAX_NAME)
        value = None if key is None else (yield from stream.until(tags.argument_end))
        if key is None:
            return True
        if value is None:  # the answer is cut: so is the string
            stream.arguments(f"{before}{json_text(key[0])}: {json_text(stream.take().removeprefix(line))[:-1]}")
            return True
        text = value[0].removeprefix(line).removesuffix(line)
        stream.arguments(f"{before}{json_text(key[0])}: {typed(text, key[0], schema)}")
        before = ", "


def write_tagged_call(grammar: CallGrammar, tags: Tags) -> str:
    """The grammar of one call: arguments in the schema's order, those that are not required may be left out."""
    return grammar.any_of([_one(grammar, tags, name, schema) for name, schema in grammar.tools.items()])


def _one(grammar: CallGrammar, tags: Tags, name: str, schema: Schema) -> str:
    properties = schema.get("properties")
    required = schema.get("required")
    parts = [grammar.literal(f"{tags.begin}{name}{tags.name_end}\n")]
    for key, own in (properties if isinstance(properties, dict) else {}).items():
        line = "\n" if tags.on_own_lines else ""
        begin = grammar.literal(f"{tags.argument}{key}{tags.argument_name_end}{line}")
        value = _value(grammar, own, schema, line + tags.argument_end)
        newline = grammar.literal("\n")
        is_required = isinstance(required, list) and key in required
        parts.append(f"({begin} {value} {newline})" + ("" if is_required else "?"))
    return " ".join([*parts, grammar.literal(tags.end)])


def _value(grammar: CallGrammar, own: object, root: Schema, end: str) -> str:
    """A value and its end, as the model must write it for `typed` to read what the schema allows."""
    schema = own if isinstance(own, dict) else {}
    if is_text(schema, root):
        texts = texts_of(schema, root)
        return (
            f"{grammar.any_of(list(map(grammar.literal, texts)))} {grammar.literal(end)}"
            if texts
            else grammar.up_to(end)
        )
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"{grammar.json({**shared, **schema})} {grammar.literal(end)}"
