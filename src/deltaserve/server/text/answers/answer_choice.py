"""Which format the answers of a model have: the one that reads what its chat template writes of an earlier answer.

Templates differ, and their names tell nothing. An operator may name a format in place of the choice.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deltaserve.core.branches import ANSWERS, Branch
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.branch_code import load_branch
from deltaserve.server.text.answer_pieces import Arguments, CallBegins
from deltaserve.server.text.answers.answer_reader import AnswerReader, AnswerReading
from deltaserve.server.text.answers.answer_stream import Spelling, spelling_of
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, Thinking
from deltaserve.server.text.conversation import shaped
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.template_needs import Message, TemplateError

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of formats as an operator gives them: of calls, and of reasoning. `auto`: by the template; or `none`."""

    calls: str = AUTO
    reasoning: str = AUTO


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """The formats of one model's answers."""

    calls: AnswerSyntax | None = None
    reasoning: AnswerSyntax | None = None
    spelling: Spelling = Spelling({}, {})  # noqa: RUF009  # frozen


def name_of(each: AnswerSyntax | None) -> str | None:
    """The branch of a format."""
    return next((name for name, found in FORMATS.items() if found is each), None)


def _format(branch: Branch) -> AnswerSyntax:
    found = load_branch(branch).FORMAT
    assert isinstance(found, AnswerSyntax)
    return found


FORMATS: Mapping[str, AnswerSyntax] = {name: _format(branch) for name, branch in ANSWERS.items()}


def choose(control: Mapping[str, int], template: ChatTemplate | None, parsers: Parsers) -> AnswerChoice:
    """`control`: control tokens of the vocabulary |-> ids. Raises ConfigError for a name that is no format's."""
    calls = _named(parsers.calls, "tool-call-parser", _has_calls)
    reasoning = _named(parsers.reasoning, "reasoning-parser", _has_reasoning)
    if template is not None:
        chats = _Chats(template)
        if parsers.calls == AUTO:
            calls = next((each for each in FORMATS.values() if _reads_calls(each, control, chats)), None)
        if parsers.reasoning == AUTO:
            reasoning = next((each for each in FORMATS.values() if _tells_reasoning(each, control, chats)), None)
    markers = frozenset[str]().union(*(each.markers for each in (calls, reasoning) if each is not None))
    return AnswerChoice(calls, reasoning, spelling_of(markers, control))


def answer_ends(control: Mapping[str, int], template: ChatTemplate | None) -> frozenset[int] | None:
    """Control tokens that end an answer of several messages. None: the model's answers are one."""
    chats = None if template is None else _Chats(template)
    for each in FORMATS.values():
        if _has_messages(each, control, chats):
            assert each.messages is not None
            return frozenset(control[text] for text in each.messages.ends & control.keys())
    return None


def _has_calls(each: AnswerSyntax) -> bool:
    return each.calls is not None or each.messages is not None


def _has_reasoning(each: AnswerSyntax) -> bool:
    return each.thinking is not None or each.messages is not None


def _named(name: str, setting: str, fits: Callable[[AnswerSyntax], bool]) -> AnswerSyntax | None:
    if name in (AUTO, NONE):
        return None
    known = {each: FORMATS[each] for each in FORMATS if fits(FORMATS[each])}
    if name not in known:
        raise ConfigError(f"--{setting} {name[:60]!r}: must be auto, none or one of {', '.join(known)}")
    return known[name]


# ---------------------------------------------------------------- probes

_ANSWER, _REASONING, _CALLED, _TOLD = "qavuzo", "remiko", "gerafu", "zolipe"
_ARGUMENTS: Mapping[str, object] = {"tosabe": "lupimo"}
_ASKED: Message = {"role": "user", "content": "hello"}
_CALL = {"id": "a1B2c3D4e", "type": "function", "function": {"name": _CALLED, "arguments": _ARGUMENTS}}
_TOOLS = {_CALLED: {"type": "object", "properties": {"tosabe": {"type": "string"}}}}


class _Chats:
    """What a template writes of chats."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.source = template.source
        self.prompt = self._text([_ASKED])
        self.answered = self._text([_ASKED, {"role": "assistant", "content": _ANSWER}, _ASKED])
        told: Message = {"role": "tool", "content": _TOLD, "tool_call_id": _CALL["id"], "name": _CALLED}
        called = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
        self.called = self._text([_ASKED, called, told])
        self.reasoned = [
            self._text([_ASKED, {**called, "reasoning_content": _REASONING}, told]),
            self._text([_ASKED, {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASONING}]),
        ]

    def _text(self, messages: Sequence[Message]) -> str:
        """Empty where the template refuses."""
        try:
            return self._template.render(shaped(messages, self._template.needs), {}).text
        except TemplateError:
            return ""

    def calls(self) -> Iterator[str]:
        """A turn that calls, alone, as it may be cut out of a chat."""
        until = self.called.partition(_TOLD)[0]
        num_same = next((k for k, pair in enumerate(zip(until, self.prompt, strict=False)) if len({*pair}) > 1), None)
        yield until[len(self.prompt) if num_same is None else num_same :]
        yield until.partition(str(_ASKED["content"]))[2]


def _has_messages(each: AnswerSyntax, control: Mapping[str, int], chats: _Chats | None) -> bool:
    """By the control tokens, and by what the template writes of an earlier answer, where there is a template."""
    messages = each.messages
    if messages is None or not messages.needed <= control.keys():
        return False
    return chats is None or messages.shown in chats.answered


def _reads_calls(each: AnswerSyntax, control: Mapping[str, int], chats: _Chats) -> bool:
    """Whether it reads a call of an earlier turn back as the call that it was."""
    if each.messages is not None:
        return _has_messages(each, control, chats)
    return each.calls is not None and any(_reads(each, control, text) for text in chats.calls())


def _reads(each: AnswerSyntax, control: Mapping[str, int], text: str) -> bool:
    spelling = spelling_of(each.markers, control)
    reader = AnswerReader(AnswerReading(spelling, str, calls=each, tools=_TOOLS))
    pieces = [*reader.push(marked(text, spelling)), *reader.flush()]
    begun = [piece for piece in pieces if isinstance(piece, CallBegins)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
    try:
        return len(begun) == 1 and msgspec.json.decode(arguments) == _ARGUMENTS
    except ValueError:
        return False


def _tells_reasoning(each: AnswerSyntax, control: Mapping[str, int], chats: _Chats) -> bool:
    """Whether the template marks reasoning in this way, or looks for its marker in earlier answers."""
    if each.messages is not None:
        return _has_messages(each, control, chats)
    return each.thinking is not None and _marks(each.thinking, chats)


def _marks(thinking: Thinking, chats: _Chats) -> bool:
    begin, end = re.escape(thinking.begin), re.escape(thinking.end)
    shown = re.compile(rf"{begin}\s*{_REASONING}\s*{end}")
    return thinking.end in chats.source or any(shown.search(chat) for chat in chats.reasoned)


def marked(text: str, spelling: Spelling) -> str:
    """A rendered text as a reader gets it."""
    for marker, mark in spelling.spelled.items():
        text = text.replace(marker, mark)
    return text
