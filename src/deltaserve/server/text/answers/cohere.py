"""The format of Command R7B and Command A: a JSON list of calls between markers, reasoning between others."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.json_calls import read_json_list

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    return (yield from read_json_list(stream, _END))


def _write(grammar: CallGrammar) -> str:
    call = grammar.one_json('", "tool_name": "', '", "parameters": ', "}")
    head, between = grammar.literal('{"tool_call_id": "'), ",\n    "
    calls = grammar.some(grammar.rule(f"{head} /[0-9]{{1,4}}/ {call}"), between)
    return " ".join([grammar.literal("[\n    "), calls, grammar.literal(f"\n]{_END}")])


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_END,), write=_write, is_block=True),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
)
