"""Reads one answer: tells reasoning, content and calls apart as its characters come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from deltaserve.server.text.answer_pieces import AnswerPiece, Reasoning
from deltaserve.server.text.answers.answer_stream import (
    LEFT_OF_MARKER,
    MAX_NEWLINES,
    AnswerStream,
    Spelling,
    Tools,
    Wait,
)
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, CallSyntax, Thinking


class PromptEnd(Enum):
    """Where a prompt leaves the model."""

    BEFORE = "before"
    """It may begin to reason."""
    INSIDE = "inside"
    """It reasons already."""
    BEHIND = "behind"
    """It has reasoned: all that comes is content."""


class ShowReasoning(Enum):
    """What becomes of reasoning."""

    AS_IT_COMES = "as it comes"
    AT_ONCE = "at once"
    """In one piece, when it is complete."""
    NOT = "not"
    """It is left out."""


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the answers of one request are read."""

    spelling: Spelling
    new_call_id: Callable[[], str]
    calls: AnswerSyntax | None = None
    """None: calls are not looked for."""
    tools: Tools = field(default_factory=dict)
    reasoning: AnswerSyntax | None = None
    """None: reasoning is not told apart."""
    shown: ShowReasoning = ShowReasoning.AS_IT_COMES
    prompt_end: PromptEnd = PromptEnd.BEFORE

    def begin(self, stream: AnswerStream) -> Wait[None]:
        """Read a whole answer."""
        for each in (self.reasoning, self.calls):
            if each is not None and each.messages is not None:
                return each.messages.read(stream, self.reasoning is not None)
        thinking = None if self.reasoning is None else self.reasoning.thinking
        calls = None if self.calls is None else self.calls.calls
        return _read(stream, thinking, calls, self.prompt_end)


class AnswerReader:
    """Reads one answer."""

    def __init__(self, reading: AnswerReading) -> None:
        self._stream = AnswerStream(reading.spelling, reading.tools, reading.new_call_id)
        self._shown = reading.shown
        self._kept: list[str] = []
        """Reasoning that is shown when it is complete."""
        self._run = reading.begin(self._stream)
        next(self._run)

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._stream.is_reasoning

    def push(self, text: str) -> list[AnswerPiece]:
        """The next characters, marks among them."""
        if not text:
            return []
        self._stream.feed(text)
        next(self._run)
        return self._shown_of(self._stream.take_said())

    def flush(self) -> list[AnswerPiece]:
        """The answer is over."""
        self._stream.end()
        return self._rest()

    def cut(self) -> list[AnswerPiece]:
        """The answer is over, and the model would have gone on: what has begun as a call and has no arguments yet is no
        content, and neither is a part of a marker."""
        self._stream.cut()
        return self._rest()

    def _rest(self) -> list[AnswerPiece]:
        for _ in self._run:
            pass
        return [*self._shown_of(self._stream.take_said()), *self._complete()]

    def _shown_of(self, said: list[AnswerPiece]) -> list[AnswerPiece]:
        if self._shown is ShowReasoning.AS_IT_COMES:
            return said
        if self._shown is ShowReasoning.NOT:
            return [piece for piece in said if not isinstance(piece, Reasoning)]
        return list(self._at_once(said))

    def _at_once(self, said: list[AnswerPiece]) -> Iterator[AnswerPiece]:
        for piece in said:
            if isinstance(piece, Reasoning):
                self._kept.append(piece.text)
            else:
                yield from self._complete()
                yield piece
        if not self.is_reasoning:
            yield from self._complete()

    def _complete(self) -> Iterator[AnswerPiece]:
        text, self._kept = "".join(self._kept), []
        if text:
            yield Reasoning(text)


def _read(
    stream: AnswerStream, thinking: Thinking | None, calls: CallSyntax | None, prompt_end: PromptEnd
) -> Wait[None]:
    if thinking is not None and prompt_end is not PromptEnd.BEHIND:
        yield from _read_reasoning(stream, thinking, is_open=prompt_end is PromptEnd.INSIDE)
    if calls is None:
        yield from stream.rest(stream.content)
    else:
        yield from _read_content(stream, calls)


def _read_reasoning(stream: AnswerStream, thinking: Thinking, *, is_open: bool) -> Wait[None]:
    """Only at the beginning of an answer: later the marker is a word like others."""
    stream.is_reasoning = is_open
    stream.hold()
    yield from stream.skip()
    if (yield from stream.accept(thinking.begin)):
        is_open = True
        stream.settle()
    elif stream.is_cut_off and len(stream.held().strip()) > LEFT_OF_MARKER:
        stream.drop()
    else:
        stream.rewind()
    if not is_open:
        return
    stream.is_reasoning = True
    yield from stream.skip("\n", MAX_NEWLINES)
    yield from stream.find(stream.markers(thinking.end), stream.reasoning)
    stream.is_reasoning = False
    yield from stream.skip("\n", MAX_NEWLINES)


def _read_content(stream: AnswerStream, calls: CallSyntax) -> Wait[None]:
    if calls.begins_content:
        stream.hold()
        yield from stream.skip()
        if (yield from stream.peek()) in calls.begins_content and (yield from calls.read(stream)):
            yield from _behind_call(stream)
        elif stream.is_cut_off and _has_begun(calls, stream):
            stream.drop()
        else:
            stream.rewind()
    if not calls.begins:
        yield from stream.rest(stream.content)
        return
    markers = stream.markers(*calls.begins)
    while (found := (yield from stream.find(markers, stream.content))) is not None:
        stream.hold()
        if (yield from calls.read(stream)):
            yield from _behind_call(stream)
        elif stream.is_cut_off:
            stream.drop()
        else:
            stream.rewind()
            stream.content(found[0])


def _behind_call(stream: AnswerStream) -> Wait[None]:
    """What is left of a call that was cut is of it as well."""
    yield from stream.skip()
    if stream.is_cut_off:
        stream.drop()


def _has_begun(calls: CallSyntax, stream: AnswerStream) -> bool:
    """Whether what is held, and was cut, is the beginning of a call: its name is one of a tool, as far as it came."""
    found = None if calls.head is None else calls.head.match(stream.held())
    if found is None:
        return False
    return found[1] in stream.tools if found[2] else any(name.startswith(found[1]) for name in stream.tools)
