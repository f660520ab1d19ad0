"""The format of Llama 3: an answer that is calls alone, `{"name": ..., "parameters": {...}}` with `;` between them."""

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar
from deltaserve.server.text.answers.json_calls import read_json_call


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: read_json_call(stream, any_order=False), separator=";"))


def _write(grammar: CallGrammar) -> str:
    return grammar.some(grammar.one_json('{"name": "', '", "parameters": ', "}"), "; ")


FORMAT = AnswerSyntax(
    CallSyntax(
        _read,
        begins=("<|python_tag|>",),
        begins_content=("{",),
        write=_write,
        is_block=True,
        writes_marker=False,
    )
)
