"""The grammar of a whole answer: reasoning first, where the model reasons; then calls, content, or either."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from deltaserve.server.text.answers.answer_reader import PromptEnd
from deltaserve.server.text.answers.answer_stream import Tools
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking
from deltaserve.server.text.answers.call_grammar import TEXT, CallGrammar

_ANSWER = "answer"


class Calls(Enum):
    """What an answer's calls are by its grammar."""

    NONE = "none"
    MAY = "may"
    MUST = "must"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What an answer must be."""

    calls: Calls
    tools: Tools
    """Name |-> schema that the arguments must satisfy."""
    several: bool
    content: str | None
    """Grammar of the content, as of structured output; None: any text."""
    prompt_end: PromptEnd


def answer_grammar(
    shape: AnswerShape, calls: AnswerSyntax | None, reasoning: AnswerSyntax | None, ids: Mapping[str, int]
) -> str | None:
    """The grammar, for llguidance. None: there is none for such an answer in these formats.

    `ids`: control token |-> id, of all markers that are some.
    """
    grammar = CallGrammar(ids, shape.tools, shape.several)
    if any(each is not None and each.messages is not None for each in (calls, reasoning)):
        return _of_messages(shape, (calls, reasoning), grammar)
    syntax = None if calls is None or shape.calls is Calls.NONE else calls.calls
    if shape.calls is not Calls.NONE and (syntax is None or syntax.write is None):
        return None
    thinking = None if reasoning is None else reasoning.thinking
    before = "" if thinking is None else _thoughts(grammar, thinking, shape.prompt_end)
    body = _body(grammar, shape, syntax)
    return None if body is None else _complete(grammar, f"{before} {body}", shape.content)


def _of_messages(shape: AnswerShape, formats: Sequence[AnswerSyntax | None], grammar: CallGrammar) -> str | None:
    messages = next((each.messages for each in formats if each is not None and each.messages is not None), None)
    if messages is None or (shape.calls is Calls.MAY and shape.content is None):
        return None
    content = "" if shape.content is None else f"@{_ANSWER}"
    return _complete(grammar, messages.write(grammar, content), shape.content)


def _thoughts(grammar: CallGrammar, thinking: Thinking, prompt_end: PromptEnd) -> str:
    if prompt_end is PromptEnd.BEHIND:
        return ""
    ended = f"{grammar.up_to(thinking.end)} {_NEWLINES}"
    if prompt_end is PromptEnd.INSIDE:
        return ended
    return f"({grammar.literal(thinking.begin)} {ended})?"


_NEWLINES = r"/\n{0,2}/"


def _body(grammar: CallGrammar, shape: AnswerShape, syntax: CallSyntax | None) -> str | None:
    content = TEXT if shape.content is None else f"@{_ANSWER}"
    if syntax is None or syntax.write is None:
        return content
    begin = grammar.begin_of(syntax.begins) if syntax.writes_marker else ""
    rest = syntax.write(grammar)
    block = grammar.rule(f"{grammar.literal(begin)} {rest}")
    is_repeated = shape.several and not syntax.is_block
    blocks = f"{block} ({_NEWLINES} {block})*" if is_repeated else block
    if shape.calls is Calls.MUST:
        return blocks
    if shape.content is not None:
        return f"({blocks} | {content})"
    if not begin:
        return None  # any text may begin as a call does
    called = f"{grammar.up_to(begin)} {rest}"
    return f"({called})* {TEXT}" if is_repeated else f"({called})? {grammar.without(begin)}"


def _complete(grammar: CallGrammar, start: str, content: str | None) -> str:
    own = {"lark_grammar": grammar.text(start)}
    if content is None:
        return json.dumps({"grammars": [own]}, ensure_ascii=False)
    first, *others = json.loads(content)["grammars"]
    return json.dumps({"grammars": [own, {**first, "name": _ANSWER}, *others]}, ensure_ascii=False)
