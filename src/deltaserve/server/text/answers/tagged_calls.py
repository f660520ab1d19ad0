"""Calls written in tags: a name, and a tag for each argument, whose text is as the schema says."""

from dataclasses import dataclass

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.typed_values import Schema, is_json, is_text, json_text, texts_of, typed

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the parts of a call."""

    begin: str
    """Before the name."""
    name_end: str
    argument: str
    """Before the name of an argument."""
    argument_name_end: str | tuple[str, str]
    """Two: white space may stand between them."""
    argument_end: str
    end: str
    on_own_lines: bool
    """A line break stands before and behind each value."""
    may_join: bool = False
    """Line breaks between parts may be left out."""
    kinds: tuple[str, str] = ("", "")
    """Behind the name of an argument: that its value is a text, or JSON."""


DSML_MARK = "\uff5cDSML\uff5c"
DSML = Tags(
    f'<{DSML_MARK}invoke name="',
    '">',
    f'<{DSML_MARK}parameter name="',
    ">",
    f"</{DSML_MARK}parameter>",
    f"</{DSML_MARK}invoke>",
    on_own_lines=False,
    kinds=('" string="true"', '" string="false"'),
)
"""The markup of DeepSeek V3.2 and V4, which tells of each argument whether it is a text."""


def tagged_block(begin: str, end: str, tags: Tags, *inside: str) -> CallSyntax:
    """Calls that stand between two markers together, each on lines of its own."""

    def read(stream: AnswerStream) -> Wait[bool]:
        return (yield from stream.each_call(lambda: read_tagged_call(stream, tags), end))

    def write(grammar: CallGrammar) -> str:
        newline = grammar.literal("\n")
        calls = grammar.some(grammar.rule(f"{write_tagged_call(grammar, tags)} {newline}"))
        return f"{newline} {calls} {grammar.literal(end)}"

    return CallSyntax(read, begins=(begin,), inside=(*inside, end), write=write, is_block=True)


def marked_tags(begin: str, end: str, tags: Tags) -> CallSyntax:
    """Calls that stand between two markers each, on lines of their own."""

    def read(stream: AnswerStream) -> Wait[bool]:
        yield from stream.skip()
        if not (yield from read_tagged_call(stream, tags)):
            return False
        yield from stream.skip()
        yield from stream.accept(end)
        return True

    def write(grammar: CallGrammar) -> str:
        line, last = grammar.literal("\n"), grammar.literal(f"\n{end}")
        return f"{line} {write_tagged_call(grammar, tags)} {last}"

    return CallSyntax(read, begins=(begin,), inside=(end,), write=write)


def read_tagged_call(stream: AnswerStream, tags: Tags) -> Wait[bool]:
    """Say the call that begins here. False: it is none, and some of it was read."""
    if not (yield from stream.accept(tags.begin)):
        return False
    named = yield from stream.until(tags.name_end, most=_MAX_NAME)
    if named is None or named[0] not in stream.tools:
        return False
    stream.begin_call(named[0])
    yield from read_tagged_arguments(stream, tags, stream.tools[named[0]])
    return True


def read_tagged_arguments(stream: AnswerStream, tags: Tags, schema: Schema, *, is_begun: bool = False) -> Wait[None]:
    """Say the arguments of the call that has begun, up to its end. `is_begun`: the first one's tag was read.

    What is malformed is content, and the arguments have no end.
    """
    before = "{"
    line = "\n" if tags.on_own_lines else ""
    while True:
        yield from stream.skip()
        if not is_begun and (yield from stream.accept(tags.end)):
            stream.arguments("{}" if before == "{" else "}")
            return
        if not is_begun and not (yield from stream.accept(tags.argument)):
            return
        is_begun = False
        key = yield from _key(stream, tags)
        if key is None:
            return
        key, kind = _kind(key, tags)
        value = yield from stream.until(tags.argument_end)
        if value is None:  # the answer is cut: so is the string
            stream.arguments(f"{before}{json_text(key)}: {json_text(stream.take().removeprefix(line))[:-1]}")
            return
        text = value[0].removeprefix(line).removesuffix(line)
        told = text if kind == tags.kinds[1] and kind and is_json(text) else typed(text, key, schema)
        stream.arguments(f"{before}{json_text(key)}: {json_text(text) if kind == tags.kinds[0] and kind else told}")
        before = ", "


def _key(stream: AnswerStream, tags: Tags) -> Wait[str | None]:
    first, *others = [tags.argument_name_end] if isinstance(tags.argument_name_end, str) else tags.argument_name_end
    key = yield from stream.until(first, most=_MAX_NAME)
    for each in others:
        yield from stream.skip()
        if not (yield from stream.accept(each)):
            return None
    return None if key is None else key[0]


def _kind(key: str, tags: Tags) -> tuple[str, str]:
    """(name of an argument, which kind of value was told)."""
    kind = next((each for each in tags.kinds if each and key.endswith(each)), "")
    return key.removesuffix(kind), kind


def write_tagged_call(grammar: CallGrammar, tags: Tags) -> str:
    """The grammar of one call: arguments in the schema's order, those that are not required may be left out."""
    return grammar.any_of([_one(grammar, tags, name, schema) for name, schema in grammar.tools.items()])


def _one(grammar: CallGrammar, tags: Tags, name: str, schema: Schema) -> str:
    properties = schema.get("properties")
    required = schema.get("required")
    newline = '"\\n"?' if tags.may_join else grammar.literal("\n")
    parts = [grammar.literal(f"{tags.begin}{name}{tags.name_end}"), newline]
    first, *others = [tags.argument_name_end] if isinstance(tags.argument_name_end, str) else tags.argument_name_end
    line = "\n" if tags.on_own_lines else ""
    for key, own in (properties if isinstance(properties, dict) else {}).items():
        kind = tags.kinds[not is_text(own if isinstance(own, dict) else {}, schema)]
        begin = [grammar.literal(f"{tags.argument}{key}{kind}{first}{'' if others else line}")]
        begin += [f"{newline} {grammar.literal(each + line)}" for each in others]
        value = _value(grammar, own, schema, line + tags.argument_end)
        is_required = isinstance(required, list) and key in required
        parts.append(f"({' '.join(begin)} {value} {newline})" + ("" if is_required else "?"))
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
    return f"{grammar.json_part(schema, root)} {grammar.literal(end)}"
