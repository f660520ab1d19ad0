"""What an answer is made of, in the order in which a model wrote it; each dialect says it in its own words."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool. Its arguments follow; the next piece of another kind or call ends them."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, a JSON object as text."""

    index: int
    text: str


AnswerPiece = Content | Reasoning | CallBegins | Arguments


def arguments_of(call: CallBegins, pieces: Sequence[AnswerPiece]) -> str:
    """All that `pieces` hold of a call's arguments."""
    return "".join([each.text for each in pieces if isinstance(each, Arguments) and each.index == call.index])


def merged(pieces: Sequence[AnswerPiece]) -> tuple[AnswerPiece, ...]:
    """The same answer, neighbouring texts of one kind joined: as many pieces as there are changes."""
    if len(pieces) < 2:
        return tuple(pieces)
    joined: list[AnswerPiece] = []
    for key, group in groupby(enumerate(pieces), _kind):
        same = [piece for _, piece in group]
        joined.append(same[0] if len(same) == 1 or key[1] else _joined(same))
    return tuple(joined)


def _kind(numbered: tuple[int, AnswerPiece]) -> tuple[object, object]:
    """Equal for neighbours that can be joined. Nothing can be joined with the beginning of a call."""
    number, piece = numbered
    if isinstance(piece, Arguments):
        return piece.index, None
    return (CallBegins, number + 1) if isinstance(piece, CallBegins) else (type(piece), None)


def _joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    text = "".join(piece.text for piece in pieces if not isinstance(piece, CallBegins))
    first = pieces[0]
    if isinstance(first, Arguments):
        return Arguments(first.index, text)
    return Reasoning(text) if isinstance(first, Reasoning) else Content(text)
