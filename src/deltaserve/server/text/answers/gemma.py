"""The formats of FunctionGemma and Gemma 4: `call:NAME{key:VALUE,...}` between markers, strings between markers of
their own."""

import re

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.typed_values import Schema, is_json, json_text, kinds_of, texts_of

_BEGINS, _ENDS = ("<|tool_call>", "<start_function_call>"), ("<tool_call|>", "<end_function_call>")
_QUOTES = ('<|"|>', "<escape>")
_CHANNEL = "<|channel>"
_THOUGHTS = Thinking(f"{_CHANNEL}thought", "<channel|>")
_MAX_NAME = 256
_MAX_DEPTH = 64
_KEY = re.compile(r"[^:,{}\[\]<\s]{1,256}")
_BARE = re.compile(r"[^,{}\[\]<\s]{1,256}")


def _read(stream: AnswerStream) -> Wait[bool]:
    if not (yield from stream.accept("call:")):
        return False
    named = yield from stream.until("{", most=_MAX_NAME)
    if named is None or named[0] not in stream.tools:
        return False
    stream.begin_call(named[0])
    if not (yield from _members(stream)):
        return True
    yield from stream.skip()
    for end in _ENDS:
        if (yield from stream.accept(end)):
            break
    return True


def _members(stream: AnswerStream) -> Wait[bool]:
    """Say the arguments, one after the other, up to their closing brace. False: they are malformed or cut."""
    before = "{"
    while True:
        yield from stream.skip()
        if (yield from stream.accept("}")):
            stream.arguments("{}" if before == "{" else "}")
            return True
        member = yield from _member(stream, _MAX_DEPTH)
        if member is None:
            return False
        stream.arguments(before + member)
        before = ", "
        yield from stream.skip()
        yield from stream.accept(",")


def _member(stream: AnswerStream, depth: int) -> Wait[str | None]:
    """`key:VALUE` as JSON."""
    key = yield from _string(stream)
    if key is None:
        found = yield from stream.pattern(_KEY)
        key = None if found is None else found[0]
    yield from stream.skip()
    if key is None or not (yield from stream.accept(":")):
        return None
    value = yield from _value(stream, depth)
    return None if value is None else f"{json_text(key)}: {value}"


def _string(stream: AnswerStream) -> Wait[str | None]:
    for quote in _QUOTES:
        if (yield from stream.accept(quote)):
            found = yield from stream.until(quote)
            return None if found is None else found[0]
    return None


def _value(stream: AnswerStream, depth: int) -> Wait[str | None]:
    """JSON of the value that comes next. None: there is none, or it is cut."""
    yield from stream.skip()
    char = yield from stream.peek()
    if char in ("{", "[") and depth:
        return (yield from _several(stream, char, depth))
    text = yield from _string(stream)
    if text is not None:
        return json_text(text)
    bare = yield from stream.pattern(_BARE)
    if bare is None:
        return None
    return bare[0] if is_json(bare[0]) else json_text(bare[0])


def _several(stream: AnswerStream, opening: str, depth: int) -> Wait[str | None]:
    """An object or a list, whole."""
    closing = "}" if opening == "{" else "]"
    yield from stream.accept(opening)
    parts: list[str] = []
    while True:
        yield from stream.skip()
        if (yield from stream.accept(closing)):
            return opening + ", ".join(parts) + closing
        part = yield from (_member if opening == "{" else _value)(stream, depth - 1)
        if part is None:
            return None
        parts.append(part)
        yield from stream.skip()
        yield from stream.accept(",")


_FORMS = dict(zip(_BEGINS, zip(_QUOTES, _ENDS, strict=True), strict=True))
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"


def _write(grammar: CallGrammar) -> str:
    quote, end = _FORMS[grammar.begin_of(_BEGINS)]
    text = f"{grammar.literal(quote)} {grammar.up_to(quote)}"
    value = grammar.rule("")
    pair = grammar.rule(f'/[A-Za-z0-9_]+/ ":" {value}')
    obj = grammar.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
    array = grammar.rule(f'"[" ({value} ("," {value})*)? "]"')
    grammar.define(value, f'{text} | {_NUMBER} | "true" | "false" | "null" | {obj} | {array}')
    kinds = {
        "string": text,
        "integer": "/-?(0|[1-9][0-9]{0,17})/",
        "number": _NUMBER,
        "boolean": '("true" | "false")',
        "null": '"null"',
        "object": obj,
        "array": array,
    }
    calls = []
    for name, schema in grammar.tools.items():

        def member(key: str, own: object, root: Schema = schema) -> str:
            listed = texts_of(own, root) if isinstance(own, dict) else []
            found = [kinds[kind] for kind in sorted(kinds_of(own, root)) if kind in kinds]
            texts = [grammar.literal(f"{quote}{each}{quote}") for each in listed]
            return f"{grammar.literal(f'{key}:')} {grammar.any_of(texts or found or [value])}"

        head, tail = grammar.literal(f"call:{name}{{"), grammar.literal("}" + end)
        calls.append(f"{head} {grammar.members(schema, member, ',')} {tail}")
    return grammar.any_of(calls)


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=_BEGINS, inside=(*_ENDS, *_QUOTES, _CHANNEL), write=_write),
    _THOUGHTS,
)
