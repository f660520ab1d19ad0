"""Hermes's format, that of Qwen 2.5 and Qwen3 as well: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.json_calls import read_json_call

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    if not (yield from read_json_call(stream, any_order=True)):
        return False
    yield from stream.skip()
    yield from stream.accept(_END)
    return True


def _write(grammar: CallGrammar) -> str:
    return grammar.one_json('\n{"name": "', '", "arguments": ', f"}}\n{_END}")


FORMAT = AnswerSyntax(CallSyntax(_read, begins=(_BEGIN,), inside=(_END,), write=_write), THINK_TAGS)
