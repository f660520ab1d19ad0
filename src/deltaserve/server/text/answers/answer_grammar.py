"""The grammar of a whole answer: reasoning first, where the model reasons; then calls, content, or either."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deltaserve.server.text.answers.answer_reader import PromptEnd
from deltaserve.server.text.answers.answer_stream import Tools
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking
from deltaserve.server.text.answers.call_grammar import TEXT, CallGrammar, MarkerTokens, any_token_but

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
    most_reasoning: int | None = None
    """Most tokens of reasoning. None: any number."""


def answer_grammar(
    shape: AnswerShape, calls: AnswerSyntax | None, reasoning: AnswerSyntax | None, tokens: MarkerTokens
) -> str | None:
    """The grammar, for llguidance. None: there is none for such an answer in these formats.

    Reasoning whose length is bounded must end with a marker that is one token: `can_bound`.
    """
    beside_content = shape.content is not None
    grammar = CallGrammar(tokens, shape.tools, shape.several, shape.most_reasoning, beside_content)
    if any(each is not None and each.messages is not None for each in (calls, reasoning)):
        return _of_messages(shape, (calls, reasoning), grammar)
    syntax = None if calls is None or shape.calls is Calls.NONE else calls.calls
    if shape.calls is not Calls.NONE and (syntax is None or syntax.write is None):
        return None
    thinking = None if reasoning is None else reasoning.thinking
    if thinking is not None and shape.calls is Calls.NONE and shape.content is None:
        return _complete(grammar, _free(grammar, thinking, shape.prompt_end), None)
    before = "" if thinking is None else _thoughts(grammar, thinking, shape.prompt_end)
    return _complete(grammar, f"{before} {_body(grammar, shape, syntax)}", shape.content)


def can_bound(reasoning: AnswerSyntax, tokens: MarkerTokens) -> bool:
    """Whether the length of reasoning can be bounded: its markers are tokens, so that no guess is made at where it
    ends."""
    thinking = reasoning.thinking
    return thinking is None or (thinking.end in tokens.whole and tokens.first(thinking.begin) is not None)


def _of_messages(shape: AnswerShape, formats: Sequence[AnswerSyntax | None], grammar: CallGrammar) -> str | None:
    messages = next((each.messages for each in formats if each is not None and each.messages is not None), None)
    if messages is None:
        return None
    content = f"@{_ANSWER}" if shape.content is not None else "" if shape.calls is Calls.MUST else TEXT
    return _complete(grammar, messages.write(grammar, content), shape.content)


def _thoughts(grammar: CallGrammar, thinking: Thinking, prompt_end: PromptEnd) -> str:
    if prompt_end is PromptEnd.BEHIND:
        return ""
    ended = f"{grammar.reasoning_up_to(thinking.end)} {_NEWLINES}"
    if prompt_end is PromptEnd.INSIDE:
        return ended
    begin = grammar.literal if grammar.most_reasoning is None else grammar.marker
    return f"({begin(thinking.begin)} {ended})?"


_NEWLINES = r"/\n{0,2}/"


def _free(grammar: CallGrammar, thinking: Thinking, prompt_end: PromptEnd) -> str:
    """Reasoning, and any tokens behind it, those that end the answer among them. Reasoning may begin behind white
    space, so what begins the answer is told apart token by token."""
    spaces, rest = grammar.tokens.spaces, f"{any_token_but()}*"
    thoughts = f"{grammar.reasoning_up_to(thinking.end)} {rest}"
    if prompt_end is PromptEnd.INSIDE:
        return thoughts
    first = grammar.tokens.first(thinking.begin)
    assert first is not None, "can_bound said so"
    other = any_token_but(spaces, [first])
    before = f"<[{','.join(map(str, sorted(spaces)))}]>*" if spaces else ""
    return f"{before} ({grammar.marker(thinking.begin)} {thoughts} | {other} {rest})?"


def _body(grammar: CallGrammar, shape: AnswerShape, syntax: CallSyntax | None) -> str:
    content = TEXT if shape.content is None else f"@{_ANSWER}"
    if syntax is None or syntax.write is None:
        return content
    begin = grammar.begin_of(syntax.begins) if syntax.writes_free is None else ""
    rest = syntax.write(grammar)
    block = grammar.rule(f"{grammar.literal(begin)} {rest}")
    is_repeated = shape.several and not syntax.is_block
    blocks = f"{block} ({_NEWLINES} {block})*" if is_repeated else block
    if shape.calls is Calls.MUST:
        return blocks
    if shape.content is not None:
        return f"({blocks} | {content})"
    if syntax.writes_free is not None:
        free = syntax.writes_free(grammar)
        marked = [grammar.literal(each) for each in syntax.begins if each in grammar.tokens.control]
        called = f"({' | '.join(marked)}) {blocks}" if marked else ""
        return f"({blocks} | {free} ({called})?)" if called else f"({blocks} | {free})"
    called = f"{grammar.up_to(begin)} {rest}"
    return f"({called})* {TEXT}" if is_repeated else f"({called})? {grammar.without(begin)}"


def _complete(grammar: CallGrammar, start: str, content: str | None) -> str:
    own = {"lark_grammar": grammar.text(start)}
    if content is None:
        return json.dumps({"grammars": [own]}, ensure_ascii=False)
    first, *others = json.loads(content)["grammars"]
    return json.dumps({"grammars": [own, {**first, "name": _ANSWER}, *others]}, ensure_ascii=False)
