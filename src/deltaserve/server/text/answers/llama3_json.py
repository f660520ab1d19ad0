"""The format of Llama 3: an answer that is calls alone, `{"name": ..., "parameters": {...}}` with `;` between them."""

import re

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax
from deltaserve.server.text.answers.call_grammar import CallGrammar, pattern_of
from deltaserve.server.text.answers.json_calls import read_json_call
from deltaserve.server.text.answers.typed_values import json_text

_BEGIN = "<|python_tag|>"
_HEAD = re.compile(r'\s*\{(?:\s*"(?:type|id)"\s*:\s*"(?:[^"\\]|\\.)*"\s*,)*\s*"name"\s*:\s*"([\w.-]+)(")?', re.ASCII)


def _read(stream: AnswerStream) -> Wait[bool]:
    return (yield from stream.each_call(lambda: read_json_call(stream, any_order=False), separator=";"))


def _write(grammar: CallGrammar) -> str:
    """Beside content of a grammar, which may be an object as well, a call is one by its schema: its parts are those of
    JSON. A text as long as a call's head would be read to its end before content is thought of."""
    if not grammar.beside_content:
        return grammar.some(grammar.one_json('{"name": "', '", "parameters": ', "}"), "; ")
    calls = []
    for name, schema in grammar.tools.items():
        call = {"type": "object", "properties": {"name": {"const": name}, "parameters": schema}}
        wanted = {**call, "required": ["name", "parameters"], "additionalProperties": False}
        calls.append(grammar.json_part(wanted, schema))
    return grammar.some(grammar.any_of(calls), "; ")


def _write_free(grammar: CallGrammar) -> str:
    """Any text but one that begins with the name of a tool where a call has it: what the reader takes for a call is
    written by `_write`."""
    names = "|".join(pattern_of(json_text(name)) for name in grammar.tools)
    before = r'\s*\{(\s*"(type|id)"\s*:\s*"([^"\\]|\\.)*"\s*,)*\s*"name"\s*:\s*'
    escaped = r'"[^"\\]*\\'
    return grammar.text_but(f"{before}({names}|{escaped})(?s:.*)", f"(?s:.*){pattern_of(_BEGIN)}(?s:.*)")


FORMAT = AnswerSyntax(
    CallSyntax(
        _read,
        begins=(_BEGIN,),
        begins_content=("{",),
        head=_HEAD,
        write=_write,
        is_block=True,
        writes_free=_write_free,
    )
)
