"""The format of Kimi K2: calls between control tokens, `functions.NAME:NUMBER` and JSON."""

import re

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAMED = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?", re.ASCII)
_MAX_NAME = 256


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: _read_call(stream), _END))


def _read_call(stream: AnswerStream) -> Wait[bool]:
    if not (yield from stream.accept(_CALL)):
        return False
    head = yield from stream.until(_ARGUMENTS, most=_MAX_NAME)
    named = None if head is None else _NAMED.fullmatch(head[0].strip())
    if named is None or named[1] not in stream.tools:
        return False
    yield from stream.skip()
    if (yield from stream.peek()) != "{":
        return False
    stream.begin_call(named[1])
    if (yield from stream.json_object(stream.arguments)):
        yield from stream.skip()
        yield from stream.accept(_CALL_END)
    return True


def _write(grammar: CallGrammar) -> str:
    """Calls are numbered through the chat, which a grammar does not know."""
    begin, end = grammar.literal(_ARGUMENTS), grammar.literal(_CALL_END)
    heads = [grammar.literal(f"{_CALL}functions.{name}:") for name in grammar.tools]
    bodies = [f"/[0-9]{{1,4}}/ {begin} {grammar.json(schema)} {end}" for schema in grammar.tools.values()]
    call = grammar.any_of([f"{head} {body}" for head, body in zip(heads, bodies, strict=True)])
    return f"{grammar.some(call)} {grammar.literal(_END)}"


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_END, _CALL, _ARGUMENTS, _CALL_END), write=_write, is_block=True),
    THINK_TAGS,
)
