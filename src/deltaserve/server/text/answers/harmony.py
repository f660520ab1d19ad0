"""gpt-oss's format: messages with a role and a channel in their headers, told apart by control tokens."""

import re
from collections.abc import Iterator
from enum import Enum

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax, MessageSyntax
from deltaserve.server.text.answers.call_grammar import TEXT, CallGrammar


class _Marker(Enum):
    """What a control token of the format begins."""

    TURN = "turn"
    """The role of who speaks."""
    NAME = "name"
    """The name of the channel."""
    TEXT = "text"
    """The message itself, up to an end."""
    END = "end"
    """The end of a message. What follows is the next one's header."""
    INSIDE = "inside"
    """A part of a header without a meaning of its own."""


_MARKERS = {
    "<|start|>": _Marker.TURN,
    "<|channel|>": _Marker.NAME,
    "<|message|>": _Marker.TEXT,
    "<|end|>": _Marker.END,
    "<|return|>": _Marker.END,
    "<|call|>": _Marker.END,
    "<|constrain|>": _Marker.INSIDE,
}
_ROLE = "assistant"


class _Shown(Enum):
    """Where the text of a message is shown."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


# Preambles to calls are meant for the user.
_PARTS = {"analysis": _Shown.REASONING, "commentary": _Shown.CONTENT, "final": _Shown.CONTENT}
"""Channel |-> where its text is shown. Text of any other channel stays in the content with its markers."""

_MAX_HEADER_CHARS = 256
_ADDRESSED = "to="
"""Word in a header that makes the message a call."""
_RECIPIENT = re.compile(rf"\b{_ADDRESSED}(?:functions\.)?([\w.-]+)", re.ASCII)
_MARK = re.compile("([\ud800-\udfff])")


def _read(stream: AnswerStream, tells_reasoning: bool) -> Wait[None]:
    messages = _Messages(stream, tells_reasoning)
    while True:
        for run in _MARK.split(stream.take()):
            marker = stream.marker_of(run)
            if marker is not None:
                messages.marker(_MARKERS[marker], marker)
            elif run:
                messages.text(run)
        if not (yield from stream.more()):
            messages.end()
            return


class _Messages:
    """Takes an answer by markers and texts; says where each text belongs.

    Nothing a model wrote is lost: a message whose header is not of the format, or which calls what is no tool of the
    request, is content with its markers. Successive messages of one part are lines of their own.
    """

    def __init__(self, stream: AnswerStream, tells_reasoning: bool) -> None:
        self._stream = stream
        self._tells_reasoning = tells_reasoning
        self._header: list[tuple[_Marker | None, str]] | None = []
        """Header of the message that comes; None: in a text."""
        self._part = _Shown.CONTENT
        self._is_raw = False
        """The text is shown with its markers."""
        self._is_new_line = False
        self._spoke: set[_Shown] = set()
        self._lacks_arguments = False

    def marker(self, marker: _Marker, raw: str) -> None:
        """The next control token."""
        if self._header is None:
            self._in_text(marker, raw)
        else:
            self._in_header(marker, raw)

    def text(self, text: str) -> None:
        """Characters that other tokens completed."""
        if self._header is None:
            self._say(self._part, text)
        else:
            self._in_header(None, text)

    def end(self) -> None:
        """The answer is over. A header that no text followed says nothing, unless it was no header; where the answer
        was cut, one of a call says nothing as well."""
        self._end_message()
        header, self._header = self._header or [], []
        text = "".join(raw for _, raw in header)
        is_markup = bool(header) and header[0][0] is not None and _ADDRESSED not in text
        is_cut_call = self._stream.is_cut and _ADDRESSED in text
        if not (is_markup or is_cut_call):
            self._say(_Shown.CONTENT, text)

    def _in_text(self, marker: _Marker, raw: str) -> None:
        if marker in (_Marker.TEXT, _Marker.INSIDE):
            self._say(self._part, raw)
            return
        self._header = [] if marker is _Marker.END else [(marker, raw)]
        if self._is_raw and marker is _Marker.END:
            self._say(self._part, raw)
        self._end_message()

    def _end_message(self) -> None:
        """A call without arguments has an empty object of them, unless they were still to come."""
        if self._lacks_arguments and not self._stream.is_cut:
            self._stream.arguments("{}")
        self._lacks_arguments = self._stream.is_reasoning = False

    def _in_header(self, marker: _Marker | None, raw: str) -> None:
        assert self._header is not None
        if marker is _Marker.TURN:
            self._say_header()
            self._header = [(marker, raw)]
            return
        self._header.append((marker, raw))
        if marker is _Marker.TEXT:
            self._begin_text()
        elif marker is _Marker.END or (marker is None and not self._may_be_header()):
            self._say_header()
            self._header, self._part, self._is_raw = ([] if marker is _Marker.END else None), _Shown.CONTENT, False

    def _begin_text(self) -> None:
        role, channel = self._sections()
        called = _RECIPIENT.search(f"{role} {channel or ''}")
        if called is not None and called[1] in self._stream.tools:
            self._stream.begin_call(called[1])
            self._header, self._part, self._is_raw, self._lacks_arguments = None, _Shown.CALL, False, True
            return
        part = _Shown.CONTENT if channel is None else _PARTS.get(channel.strip())
        is_plain = role.strip() in ("", _ROLE) and part is not None
        is_plain = is_plain and (self._tells_reasoning or part is not _Shown.REASONING)
        if not is_plain:
            self._say_header()
        self._header, self._is_raw, self._is_new_line = None, not is_plain, is_plain
        self._part = part if is_plain and part is not None else _Shown.CONTENT
        self._stream.is_reasoning = self._part is _Shown.REASONING

    def _sections(self) -> tuple[str, str | None]:
        """(what names the role, what names the channel or None)."""
        assert self._header is not None
        at = next((i for i, (marker, _) in enumerate(self._header) if marker is _Marker.NAME), None)
        role = "".join(raw for marker, raw in self._header[:at] if marker is None)
        if at is None:
            return role, None
        return role, "".join(raw for marker, raw in self._header[at + 1 :] if marker is not _Marker.TEXT)

    def _may_be_header(self) -> bool:
        """Whether ordinary text so far may stand in a header: names are short, and the first role is already said."""
        assert self._header is not None
        text = "".join(raw for marker, raw in self._header if marker is None)
        if self._header[0][0] is None:
            said = text.lstrip(" ")
            return _ADDRESSED.startswith(said) or (said.startswith(_ADDRESSED) and _is_short(text))
        return _is_short(text)

    def _say_header(self) -> None:
        assert self._header is not None
        self._say(_Shown.CONTENT, "".join(raw for _, raw in self._header))

    def _say(self, part: _Shown, text: str) -> None:
        if not text:
            return
        if part is _Shown.CALL:
            self._lacks_arguments = False
            self._stream.arguments(text)
            return
        line = "\n" if self._is_new_line and part in self._spoke else ""
        self._is_new_line = False
        self._spoke.add(part)
        (self._stream.reasoning if part is _Shown.REASONING else self._stream.content)(line + text)


def _is_short(text: str) -> bool:
    return len(text) <= _MAX_HEADER_CHARS and "\n" not in text


def _write(grammar: CallGrammar, content: str) -> str:
    """One call at most: what follows it is the tool's. Of reasoning that is bounded there is one message."""
    end = "<|end|><|start|>assistant"
    head = grammar.literal("<|channel|>analysis<|message|>")
    analysis = grammar.rule(f"{head} {grammar.reasoning_up_to('<|end|>')} {grammar.literal('<|start|>assistant')}")
    several, endings = [analysis], []
    for name, schema in grammar.tools.items():
        heads = grammar.any_of([grammar.literal(each) for each in _call_heads(name)])
        endings.append(f"{heads} {grammar.literal('<|message|>')} {grammar.json(schema)}")
    if content == TEXT:
        preamble = grammar.rule(f"{grammar.literal('<|channel|>commentary<|message|>')} {TEXT} {grammar.literal(end)}")
        several.append(preamble)
        endings.append(TEXT)  # no header
    endings += [f"{grammar.literal('<|channel|>final<|message|>')} {content}"] if content else []
    first = ""
    if grammar.most_reasoning is not None:
        first = f"{several.pop(0)}?"
    return f"{first} {grammar.any_of(several)}* {grammar.any_of(endings)}"


def _call_heads(name: str) -> Iterator[str]:
    """Headers of a call, as models write them: whom it is for is told behind the channel, or before it."""
    for kind in (" <|constrain|>json", " json", ""):
        yield f"<|channel|>commentary to=functions.{name}{kind}"
        yield f" to=functions.{name}<|channel|>commentary{kind}"


FORMAT = AnswerSyntax(
    messages=MessageSyntax(
        _read,
        markers=tuple(_MARKERS),
        needed=frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"}),
        shown="<|channel|>",
        write=_write,
        ends=frozenset({"<|return|>", "<|call|>"}),
    )
)
