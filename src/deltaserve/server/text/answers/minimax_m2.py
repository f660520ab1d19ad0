"""MiniMax's format: calls as `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in one block."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.tagged_calls import Tags, read_tagged_call, write_tagged_call

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = Tags('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>", on_own_lines=False)


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: read_tagged_call(stream, _TAGS), _END))


def _write(grammar: CallGrammar) -> str:
    newline = grammar.literal("\n")
    calls = grammar.some(grammar.rule(f"{write_tagged_call(grammar, _TAGS)} {newline}"))
    return f"{newline} {calls} {grammar.literal(_END)}"


FORMAT = AnswerSyntax(CallSyntax(_read, begins=(_BEGIN,), inside=(_END,), write=_write, is_block=True), THINK_TAGS)
