"""Mistral's format: `[TOOL_CALLS]` before each call's name, `[ARGS]` and JSON; in older models before one JSON list of
them all."""

import re

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.json_calls import read_json_list

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w-]{1,256}", re.ASCII)
_ID_RULE = "/[a-zA-Z0-9]{9}/"
_ID_KEY, _QUOTE = ', "id": "', '"'


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    if (yield from stream.peek()) == "[":
        return (yield from read_json_list(stream))
    name = yield from stream.pattern(_NAME)
    if name is None or name[0] not in stream.tools:
        return False
    if (yield from stream.accept(_ID)):
        yield from stream.pattern(_NAME)
    yield from stream.accept(_ARGUMENTS)
    yield from stream.skip()
    if (yield from stream.peek()) != "{":
        return False
    stream.begin_call(name[0])
    yield from stream.json_object(stream.arguments)
    return True


def _write(grammar: CallGrammar) -> str:
    """As the vocabulary tells: older ones have no `[ARGS]`. Without control tokens either form is one."""
    control, calls = grammar.tokens.control, []
    if not control or _ARGUMENTS in control:
        number = f"({grammar.literal(_ID)} {_ID_RULE})?"
        for name, schema in grammar.tools.items():
            calls.append(f"{grammar.literal(name)} {number} {grammar.literal(_ARGUMENTS)} {grammar.json(schema)}")
    if _ARGUMENTS not in control:
        one = grammar.one_json('{"name": "', '", "arguments": ', "")
        number = f"({grammar.literal(_ID_KEY)} {_ID_RULE} {grammar.literal(_QUOTE)})?"
        listed = grammar.some(grammar.rule(f"{one} {number} {grammar.literal('}')}"), ", ")
        calls.append(
            f"{grammar.any_of([grammar.literal(text) for text in ('[', ' [')])} {listed} {grammar.literal(']')}"
        )
    return grammar.any_of(calls)


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_ID, _ARGUMENTS), write=_write),
    Thinking("[THINK]", "[/THINK]"),
)
