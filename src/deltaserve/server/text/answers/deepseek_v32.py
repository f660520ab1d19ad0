"""DeepSeek V3.2's format: calls in tags of its own markup, each argument with whether it is a text."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.tagged_calls import Tags, read_tagged_call, write_tagged_call

_MARK = "\uff5cDSML\uff5c"
_BEGIN, _END = f"<{_MARK}function_calls>", f"</{_MARK}function_calls>"
_TAGS = Tags(
    f'<{_MARK}invoke name="',
    '">',
    f'<{_MARK}parameter name="',
    ">",
    f"</{_MARK}parameter>",
    f"</{_MARK}invoke>",
    on_own_lines=False,
    kinds=('" string="true"', '" string="false"'),
)


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: read_tagged_call(stream, _TAGS), _END))


def _write(grammar: CallGrammar) -> str:
    newline = grammar.literal("\n")
    calls = grammar.some(grammar.rule(f"{write_tagged_call(grammar, _TAGS)} {newline}"))
    return f"{newline} {calls} {grammar.literal(_END)}"


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_MARK, _END), write=_write, is_block=True), THINK_TAGS
)
