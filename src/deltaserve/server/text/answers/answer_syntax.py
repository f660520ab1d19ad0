"""What a format of answers is: how reasoning and calls are marked, and who reads them. A branch has one: `FORMAT`."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from deltaserve.server.text.answers.answer_stream import AnswerStream, Wait
from deltaserve.server.text.answers.call_grammar import CallGrammar

WriteCalls = Callable[[CallGrammar], str]
"""Writes the grammar of calls, from behind the marker that begins them on; the expression that is all of them."""
ReadCalls = Callable[[AnswerStream], Wait[bool]]
"""Reads what follows a marker, and says the calls. False: it was none, nothing was said, and it is read as content."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls stand in an answer."""

    read: ReadCalls
    begins: tuple[str, ...] = ()
    """Markers before calls, wherever they stand; `read` goes on behind one."""
    begins_content: tuple[str, ...] = ()
    """Characters with which an answer that is calls alone begins; `read` begins at one."""
    head: re.Pattern[str] | None = None
    """Where calls begin an answer without a marker: how one begins, its name as group 1, what ends the name as 2."""
    inside: tuple[str, ...] = ()
    """Further markers that may be control tokens."""
    write: WriteCalls | None = None
    """The grammar of calls as the family's models write them. None: there is none."""
    is_block: bool = False
    """Several calls stand behind one marker; otherwise each has its own."""
    writes_free: WriteCalls | None = None
    """Where models write nothing before calls: the grammar of texts that do not begin as a call does, up to where one
    of `begins` may stand. None: they write one of `begins`."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning that stands before the content, between two markers. The prompt may end behind the first."""

    begin: str
    end: str


ReadMessages = Callable[[AnswerStream, bool], Wait[None]]
"""Reads a whole answer. The flag: whether reasoning is told apart; calls are, where there are tools."""


@dataclass(frozen=True, slots=True)
class MessageSyntax:
    """Answers of several messages with headers, of which some are reasoning and some are calls."""

    read: ReadMessages
    markers: tuple[str, ...]
    needed: frozenset[str]
    """Control tokens without which a vocabulary is of another format."""
    shown: str
    """Marker that an earlier answer has in a chat."""
    ends: frozenset[str]
    """Control tokens that end the answer and not a message alone."""
    write: Callable[[CallGrammar, str], str]
    """The grammar of an answer that calls, where there are tools, or has content of this grammar, where that is not
    empty: `TEXT` for any."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """One format. It may say how calls are written, how reasoning is, or both."""

    calls: CallSyntax | None = None
    thinking: Thinking | None = None
    messages: MessageSyntax | None = None
    """How both are, in place of the two."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers that may be control tokens."""
        found: set[str] = set()
        if self.calls is not None:
            found |= {*self.calls.begins, *self.calls.inside}
        if self.thinking is not None:
            found |= {self.thinking.begin, self.thinking.end}
        return frozenset(found | {*(self.messages.markers if self.messages else ())})


THINK_TAGS = Thinking("<think>", "</think>")
"""The markers that most models of several families share."""
