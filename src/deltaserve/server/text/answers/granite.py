"""A JSON list of calls behind one marker: the format of Granite 3 and Phi-4-mini.

Their templates show no earlier calls, so it is taken by name alone.
"""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.json_calls import read_json_list

_BEGINS, _END = ("<|tool_call|>", "functools"), "<|/tool_call|>"


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    return (yield from read_json_list(stream, _END))


def _write(grammar: CallGrammar) -> str:
    calls = grammar.some(grammar.one_json('{"name": "', '", "arguments": ', "}"), ", ")
    control = grammar.tokens.control
    end = grammar.literal(_END) if _END in control else "" if control else f"{grammar.literal(_END)}?"
    return " ".join([grammar.literal("["), calls, grammar.literal("]"), end])


FORMAT = AnswerSyntax(CallSyntax(_read, begins=_BEGINS, inside=(_END,), write=_write, is_block=True))
