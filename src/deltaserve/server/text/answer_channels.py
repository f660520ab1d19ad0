"""Answers that a model writes in channels: which text is the answer, which is reasoning. One row for each format."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class AnswerPart(Enum):
    """Where a piece of an answer is shown."""

    CONTENT = "content"
    REASONING = "reasoning"


class Marker(Enum):
    """What a control token of a format begins."""

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


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """A message is a header (role, channel) and a text. An answer begins behind the role of its first header."""

    markers: Mapping[str, Marker]
    """Control token |-> what it begins."""
    needed: frozenset[str]
    """Names without which a vocabulary is of another format."""
    role: str
    parts: Mapping[str, AnswerPart]
    """Channel |-> where its text is shown. Text of any other channel stays in the answer with its markers."""
    answer_ends: frozenset[str]
    """Control tokens that end the answer and not a message alone."""


HARMONY = ChannelFormat(
    markers={
        "<|start|>": Marker.TURN,
        "<|channel|>": Marker.NAME,
        "<|message|>": Marker.TEXT,
        "<|end|>": Marker.END,
        "<|return|>": Marker.END,
        "<|call|>": Marker.END,
        "<|constrain|>": Marker.INSIDE,
    },
    needed=frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"}),
    role="assistant",
    # Preambles to calls are meant for the user.
    parts={"analysis": AnswerPart.REASONING, "commentary": AnswerPart.CONTENT, "final": AnswerPart.CONTENT},
    answer_ends=frozenset({"<|return|>", "<|call|>"}),
)
FORMATS = (HARMONY,)


@dataclass(frozen=True, slots=True)
class Channels:
    """A format in one vocabulary."""

    format: ChannelFormat
    markers: Mapping[int, tuple[Marker, str]]
    """Token id |-> what it begins, and its text."""

    @property
    def answer_end_ids(self) -> frozenset[int]:
        return frozenset(token for token, (_, text) in self.markers.items() if text in self.format.answer_ends)


def find_channels(control: Mapping[str, int], chat: str | None) -> Channels | None:
    """The format whose control tokens a vocabulary has, and in which the template renders an earlier answer.

    `chat`: one with an answer, rendered; None without a template.
    """
    for each in FORMATS:
        names = [text for text, marker in each.markers.items() if marker is Marker.NAME]
        if each.needed <= control.keys() and (chat is None or any(name in chat for name in names)):
            return Channels(
                each, {control[text]: (marker, text) for text, marker in each.markers.items() if text in control}
            )
    return None


_MAX_HEADER_CHARS = 256
_ADDRESSED = "to="
"""Word in a header that makes the message a call."""

Shown = tuple[AnswerPart, str]


class ChannelReader:
    """Takes an answer token by token; gives its text with the part each piece belongs to.

    Nothing a model wrote is lost: a message whose header is not of the format, or which calls a tool, is content with
    its markers. Successive messages of one part are lines of their own.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._header: list[tuple[Marker | None, str]] | None = []
        """Header of the message that comes; None: in a text."""
        self._part = AnswerPart.CONTENT
        self._is_raw = False
        """The text is shown with its markers."""
        self._is_new_line = False
        self._spoke: set[AnswerPart] = set()

    def marker(self, token: int) -> list[Shown]:
        """The next token, one of `Channels.markers`."""
        marker, raw = self._channels.markers[token]
        return self._in_text(marker, raw) if self._header is None else self._in_header(marker, raw)

    def text(self, text: str) -> list[Shown]:
        """Characters that other tokens completed."""
        if not text:
            return []
        return self._say(self._part, text) if self._header is None else self._in_header(None, text)

    def flush(self) -> list[Shown]:
        """The answer is over. A header that no text followed says nothing, unless it was no header."""
        header, self._header = self._header or [], []
        text = "".join(raw for _, raw in header)
        is_markup = bool(header) and header[0][0] is not None and _ADDRESSED not in text
        return [] if is_markup else self._say(AnswerPart.CONTENT, text)

    def _in_text(self, marker: Marker, raw: str) -> list[Shown]:
        if marker in (Marker.TEXT, Marker.INSIDE):
            return self._say(self._part, raw)
        self._header = [] if marker is Marker.END else [(marker, raw)]
        return self._say(self._part, raw) if self._is_raw and marker is Marker.END else []

    def _in_header(self, marker: Marker | None, raw: str) -> list[Shown]:
        assert self._header is not None
        if marker is Marker.TURN:
            shown, self._header = self._say_header(), [(marker, raw)]
            return shown
        self._header.append((marker, raw))
        if marker is Marker.TEXT:
            return self._begin_text()
        if marker is Marker.END or (marker is None and not self._may_be_header()):
            shown = self._say_header()
            self._header, self._part, self._is_raw = ([] if marker is Marker.END else None), AnswerPart.CONTENT, False
            return shown
        return []

    def _begin_text(self) -> list[Shown]:
        role, channel = self._sections()
        part = AnswerPart.CONTENT if channel is None else self._channels.format.parts.get(channel.strip())
        is_plain = role.strip() in ("", self._channels.format.role) and part is not None
        shown = [] if is_plain else self._say_header()
        self._header, self._is_raw, self._is_new_line = None, not is_plain, is_plain
        self._part = part if is_plain and part is not None else AnswerPart.CONTENT
        return shown

    def _sections(self) -> tuple[str, str | None]:
        """(what names the role, what names the channel or None)."""
        assert self._header is not None
        at = next((i for i, (marker, _) in enumerate(self._header) if marker is Marker.NAME), None)
        role = "".join(raw for marker, raw in self._header[:at] if marker is None)
        if at is None:
            return role, None
        return role, "".join(raw for marker, raw in self._header[at + 1 :] if marker is not Marker.TEXT)

    def _may_be_header(self) -> bool:
        """Whether ordinary text so far may stand in a header: names are short, and the first role is already said."""
        assert self._header is not None
        text = "".join(raw for marker, raw in self._header if marker is None)
        if self._header[0][0] is None:
            said = text.lstrip(" ")
            return _ADDRESSED.startswith(said) or (said.startswith(_ADDRESSED) and _is_short(text))
        return _is_short(text)

    def _say_header(self) -> list[Shown]:
        assert self._header is not None
        return self._say(AnswerPart.CONTENT, "".join(raw for _, raw in self._header))

    def _say(self, part: AnswerPart, text: str) -> list[Shown]:
        if not text:
            return []
        line = "\n" if self._is_new_line and part in self._spoke else ""
        self._is_new_line = False
        self._spoke.add(part)
        return [(part, line + text)]


def _is_short(text: str) -> bool:
    return len(text) <= _MAX_HEADER_CHARS and "\n" not in text
