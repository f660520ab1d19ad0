"""An answer while it comes: readers of formats wait for characters and say what they are.

A reader is a generator. It stops at a `yield` where it needs characters that have not come, so it is written as if the
whole answer were there, and says the same pieces however the answer is cut.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from deltaserve.server.text.answer_pieces import AnswerPiece, Arguments, CallBegins, Content, Reasoning

Result = TypeVar("Result")
Wait = Generator[None, None, Result]
"""Something that is known once enough characters have come."""
Say = Callable[[str], None]
Tools = Mapping[str, Mapping[str, object]]
"""Name that a call may have |-> the JSON schema of its arguments."""

SPACE = " \t\r\n"
MAX_NEWLINES = 2
"""Line breaks beside a marker that belong to it. More would be the answer's own."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the markers of a format come in one vocabulary.

    One that is a control token there is a mark in the stream, a character that no decoded text holds: the same marker
    spelled in ordinary tokens is text. Others are their text.
    """

    marks: Mapping[int, str]
    """Id of a control token |-> its mark."""
    spelled: Mapping[str, str]
    """Marker |-> its mark."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Mark |-> marker."""
        return {mark: text for text, mark in self.spelled.items()}


_FIRST_MARK = 0xD800
"""First half of a surrogate pair, which no decoded text holds."""
_ANY_MARK = re.compile("[\ud800-\udfff]")


def spelling_of(markers: Collection[str], control: Mapping[str, int]) -> Spelling:
    """`control`: control token |-> id, of a vocabulary."""
    known = {text: chr(_FIRST_MARK + k) for k, text in enumerate(sorted(text for text in markers if text in control))}
    return Spelling({control[text]: mark for text, mark in known.items()}, known)


LEFT_OF_MARKER = 1
"""Characters of a marker that are text where an answer is cut behind them: `<` may be one, `<to` hardly."""


class Markers:
    """Markers to look for at once, as they are spelled."""

    def __init__(self, spelled: Collection[str]) -> None:
        each = "|".join(re.escape(text) for text in sorted(spelled, key=len, reverse=True))
        self.pattern = re.compile(f"\n{{0,{MAX_NEWLINES}}}({each})")
        """A marker with the line breaks before it."""
        self._firsts = frozenset(text[0] for text in spelled)
        self._heads = frozenset(text[:size] for text in spelled for size in range(1, len(text)))
        self._longest = max(map(len, spelled))

    def begun_len(self, text: str, at: int) -> int:
        """Characters at the end of text[at:] that may begin a marker."""
        start = len(text)
        low = max(at, len(text) - self._longest + 1)
        for first in self._firsts:
            place = text.find(first, low)
            while place >= 0 and text[place:] not in self._heads:
                place = text.find(first, place + 1)
            if place >= 0:
                start = min(start, place)
        return len(text) - start

    def tail_len(self, text: str, at: int) -> int:
        """Characters at the end of text[at:] that may begin a marker, or the line breaks before one."""
        start = len(text) - self.begun_len(text, at)
        least = max(at, start - MAX_NEWLINES)
        while start > least and text[start - 1] == "\n":
            start -= 1
        return len(text) - start


class AnswerStream:
    """Characters of an answer that have come and were not read yet, and the pieces that were said of those read."""

    def __init__(self, spelling: Spelling, tools: Tools, new_id: Callable[[], str]) -> None:
        self.tools = tools
        self.is_reasoning = False
        """Whether what comes next is reasoning, as far as is known."""
        self._spelled = spelling.spelled
        self._texts = spelling.texts
        self._new_id = new_id
        self._text = ""
        self._at = 0
        self._held: int | None = None
        """Where to go back to when what is tried fails."""
        self._is_over = False
        self._is_cut = False
        self._ran_out = False
        """Whether what was tried last would have read on."""
        self._num_calls = 0
        self._said: list[AnswerPiece] = []

    # ------------------------------------------------------------ for who has the characters

    def feed(self, text: str) -> None:
        """The next characters, marks among them."""
        start = self._at if self._held is None else self._held
        self._text = self._text[start:] + text
        self._at -= start
        self._held = None if self._held is None else 0

    def end(self) -> None:
        """No more will come."""
        self._is_over = True

    def cut(self) -> None:
        """No more will come, and the model would have gone on."""
        self._is_over = self._is_cut = True

    def take_said(self) -> list[AnswerPiece]:
        """What was said since it was asked last."""
        said, self._said = self._said, []
        return said

    # ------------------------------------------------------------ what a reader says

    def content(self, text: str) -> None:
        if text:
            self._said.append(Content(self._plain(text)))

    def reasoning(self, text: str) -> None:
        if text:
            self._said.append(Reasoning(self._plain(text)))

    def begin_call(self, name: str) -> None:
        """From here on the answer is not read again: what has come is the call's."""
        self._held = None
        self._said.append(CallBegins(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More arguments of the call that began last."""
        if text:
            self._said.append(Arguments(self._num_calls - 1, self._plain(text)))

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.begin_call(name)
        self.arguments(arguments)

    # ------------------------------------------------------------ what a reader reads

    def hold(self) -> None:
        """What follows is tried."""
        self._held = self._at

    def rewind(self) -> None:
        """It was something else: read on from where it was tried."""
        assert self._held is not None, "something was held"
        self._at, self._held = self._held, None
        self._ran_out = False

    def settle(self) -> None:
        """It was that."""
        self._held = None

    def drop(self) -> None:
        """Read all that has come, and say nothing of it."""
        self.take()
        self._held = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer is over, and the model would have gone on."""
        return self._is_cut

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer was cut in what was tried last."""
        return self._is_cut and self._ran_out

    def held(self) -> str:
        """What has come from where it was tried on, markers as their text."""
        return self._plain(self._text[self._held :])

    def more(self) -> Wait[bool]:
        """Wait for characters. False: the answer is over."""
        if self._is_over:
            self._ran_out = True
            return False
        yield
        return True

    def marker_of(self, mark: str) -> str | None:
        """The marker that a character stands for. None: it is a character."""
        return self._texts.get(mark)

    def spelled(self, text: str) -> str:
        """A marker, or a text with markers in it, as it stands in this stream."""
        for marker, mark in self._spelled.items():
            text = text.replace(marker, mark)
        return text

    def markers(self, *markers: str) -> Markers:
        """Markers to look for."""
        return Markers([self.spelled(marker) for marker in markers])

    def find(self, markers: Markers, say: Say) -> Wait[re.Match[str] | None]:
        """Say what stands before the next marker, and stand behind it. None: the answer is over and all of it said."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            end = len(self._text) - markers.tail_len(self._text, self._at) if found is None else found.start()
            say(self._text[self._at : end])
            self._at = end if found is None else found.end()
            if found is not None:
                return found
            if not (yield from self.more()):
                rest = self.take()
                is_begun = self._is_cut and markers.begun_len(rest, 0) > LEFT_OF_MARKER
                say(rest[: len(rest) - markers.tail_len(rest, 0)] if is_begun else rest)
                return None

    def take(self) -> str:
        """Read all that has come, marks as they are."""
        text = self._text[self._at :]
        self._at = len(self._text)
        return text

    def rest(self, say: Say) -> Wait[None]:
        """Say all that comes."""
        while True:
            say(self.take())
            if not (yield from self.more()):
                return

    def peek(self) -> Wait[str]:
        """The next character, which is not read; empty: the answer is over."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def accept(self, marker: str) -> Wait[bool]:
        """Read these characters if they come next."""
        wanted = self.spelled(marker)
        while True:
            have = self._text[self._at : self._at + len(wanted)]
            if have == wanted:
                self._at += len(wanted)
                return True
            if not wanted.startswith(have) or not (yield from self.more()):
                return False

    def skip(self, chars: str = SPACE, most: int | None = None) -> Wait[None]:
        """Read these characters as long as they come."""
        num = 0
        while num != most and (yield from self.peek()) in chars and self._at < len(self._text):
            self._at += 1
            num += 1

    def until(self, *ends: str, most: int | None = None) -> Wait[tuple[str, str] | None]:
        """(what stands before the first of these, which of them); stand behind it. None: it does not come, or not
        within `most` characters, and nothing was read."""
        wanted = {self.spelled(end): end for end in ends}
        longest, num_seen = max(map(len, wanted)), 0
        while True:
            hits = [(self._text.find(each, self._at + num_seen), each) for each in wanted]
            place, each = min(((place, each) for place, each in hits if place >= 0), default=(-1, ""))
            if place >= 0:
                before = self._text[self._at : place]
                self._at = place + len(each)
                return self._plain(before), wanted[each]
            size = len(self._text) - self._at
            num_seen = max(0, size - longest + 1)
            if (most is not None and size > most) or not (yield from self.more()):
                return None

    def pattern(self, pattern: re.Pattern[str]) -> Wait[re.Match[str] | None]:
        """Read what the pattern matches, once it is known where that ends. The pattern must fail or end at a character
        that is not its own; None: it fails, and nothing was read."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() < len(self._text):
                self._at = found.end()
                return found
            if found is None and self._at < len(self._text):
                return None
            if not (yield from self.more()):
                self._at = self._at if found is None else found.end()
                return found

    def each_call(self, read: Callable[[], Wait[bool]], *ends: str, separator: str = "") -> Wait[bool]:
        """Read calls one after the other, and what ends them all. False: the first is none."""
        num_before = self._num_calls
        yield from self.skip()
        while (yield from read()):
            yield from self.skip()
            if separator and not (yield from self.accept(separator)):
                break
            self.hold()
            yield from self.skip()
        else:
            if self._num_calls == num_before:
                return False
            if self.is_cut_off:
                return True
            self.rewind()
        for end in ends:
            yield from self.skip()
            yield from self.accept(end)
        return True

    def json_object(self, say: Say) -> Wait[bool]:
        """Say a JSON object as it comes, up to its last brace, where it begins here. False: it is cut, or has what no
        object has there, which is not read."""
        scan = _ObjectScan()
        while True:
            end = scan.go_on(self._text, self._at)
            say(self._text[self._at : end])
            self._at = end
            if scan.is_over:
                return scan.is_whole
            if not (yield from self.more()):
                say(self.take())
                return False

    def json_string(self, most: int | None = None) -> Wait[str | None]:
        """Read a JSON string of at most so many characters, its quotes as well. None: there is none."""
        if (yield from self.peek()) != '"':
            return None
        size = 1
        """Characters that are known to belong to it."""
        while most is None or size <= most:
            found = _INSIDE.match(self._text, self._at + size)
            assert found is not None, "it matches nothing, too"
            size = found.end() - self._at
            if self._text[found.end() : found.end() + 1] == '"':
                text = self._text[self._at : found.end() + 1]
                self._at = found.end() + 1
                return text
            rest = self._text[found.end() :]
            if rest not in ("", "\\") or not (yield from self.more()):
                return None
        return None

    def _plain(self, text: str) -> str:
        """Marks as the markers that they stand for."""
        if not self._texts or text.isascii():
            return text
        return _ANY_MARK.sub(lambda mark: self._texts.get(mark[0], mark[0]), text)


_INSIDE = re.compile(r'[^"\\\ud800-\udfff]*(?:\\[^\ud800-\udfff][^"\\\ud800-\udfff]*)*')
"""Characters of a string up to its end, or to an escape whose second half has not come."""
_BETWEEN = re.compile(r"[\s\w+\-.,:]*", re.ASCII)


@dataclass(slots=True)
class _ObjectScan:
    """How far a JSON object has come."""

    depth: int = 0
    in_string: bool = False
    is_over: bool = False
    is_whole: bool = False

    def go_on(self, text: str, at: int) -> int:
        """Where the part of the object ends that has come; what was scanned before is not in `text[at:]`."""
        while at < len(text) and not self.is_over:
            if self.in_string:
                at = self._string(text, at)
                if at < len(text) and text[at] == "\\" and at + 1 == len(text):
                    return at
            else:
                at = self._between(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        found = _INSIDE.match(text, at)
        assert found is not None, "it matches nothing, too"
        at = found.end()
        if at < len(text) and text[at] == '"':
            self.in_string = False
            return at + 1
        self.is_over = at < len(text) and not (text[at] == "\\" and at + 1 == len(text))  # a mark
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            self.is_over = self.is_whole = self.depth == 0
        else:
            found = _BETWEEN.match(text, at)
            if found is None or found.end() == at:
                self.is_over = True
                return at
            return found.end()
        return at + 1
