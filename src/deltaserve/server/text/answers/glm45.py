"""The format of GLM 4.5 to 4.7: `<tool_call>NAME`, a pair of tags for each argument's name and its value, and
`</tool_call>`; line breaks between them are the older models'."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import THINK_TAGS, AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.tagged_calls import Tags, read_tagged_arguments, write_tagged_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = Tags("", "", _KEY, (_KEY_END, _VALUE), _VALUE_END, _END, on_own_lines=False, may_join=True)
_MAX_NAME = 256


def _read(stream: AnswerStream) -> Wait[bool]:
    yield from stream.skip()
    head = yield from stream.until("\n", _KEY, _END, most=_MAX_NAME)
    if head is None or head[0].strip() not in stream.tools:
        return False
    name, behind = head[0].strip(), head[1]
    stream.begin_call(name)
    if behind == _END:
        stream.arguments("{}")
    else:
        yield from read_tagged_arguments(stream, _TAGS, stream.tools[name], is_begun=behind == _KEY)
    return True


def _write(grammar: CallGrammar) -> str:
    return write_tagged_call(grammar, _TAGS)


FORMAT = AnswerSyntax(
    CallSyntax(_read, begins=(_BEGIN,), inside=(_END, _KEY, _KEY_END, _VALUE, _VALUE_END), write=_write),
    THINK_TAGS,
)
