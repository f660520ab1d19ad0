"""The format of Qwen3-Coder and Qwen3.5: `<function=NAME><parameter=KEY>VALUE</parameter></function>` between
`<tool_call>` and its end, each value on lines of its own."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.tagged_calls import Tags, read_tagged_call, write_tagged_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGS = Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", on_own_lines=True)


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    if not (yield from read_tagged_call(stream, _TAGS)):
        return False
    yield from stream.skip()
    yield from stream.accept(_END)
    return True


def _write(grammar: CallGrammar) -> str:
    newline, end = grammar.literal("\n"), grammar.literal(f"\n{_END}")
    return f"{newline} {write_tagged_call(grammar, _TAGS)} {end}"


FORMAT = AnswerSyntax(CallSyntax(_read, begins=(_BEGIN,), inside=(_END,), write=_write), THINK_TAGS)
