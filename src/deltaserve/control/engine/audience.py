"""Who hears of the rows that decode on and on, and what a frame says of them that stays from step to step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import NextTokens, StreamPlace


@dataclass(frozen=True, slots=True)
class StreamedRoom:
    """A request, and whom its tokens are told."""

    request: Request
    room: Room
    front: PeerName
    epoch: int


@dataclass(slots=True)
class _Part:
    """What of the tokens is one front's."""

    indexes: list[int]
    places: list[StreamPlace]


class Audience:
    """Fronts, each with its rooms among those of some requests that draw a token each in every step."""

    def __init__(self, requests: Sequence[Request], rooms: Sequence[StreamedRoom]) -> None:
        """`rooms`: those of `requests` that have a room, in their order. Each has drawn its next token already."""
        self.requests = requests
        indexes = {request: index for index, request in enumerate(requests)}
        self._parts: dict[PeerName, _Part] = {}
        for one in rooms:
            part = self._parts.setdefault(one.front, _Part([], []))
            part.indexes.append(indexes[one.request])
            part.places.append(StreamPlace(one.room, one.epoch, one.request.output_len - 1))
        self._places = {front: tuple(part.places) for front, part in self._parts.items()}
        self._first_len = requests[0].num_tokens if requests else 0
        stops = {token for one in rooms for token in one.request.sampling.stop_token_ids}
        self.stops = frozenset(stops)
        """Ids that may end one of the outputs."""

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether it is that of these requests."""
        return bool(requests) and self.requests is requests

    def messages(self, tokens: bytes) -> Iterator[tuple[PeerName, NextTokens]]:
        """What each front is told of the newest tokens of all requests, which are packed in `tokens`."""
        ahead = self.requests[0].num_tokens - self._first_len
        for front, part in self._parts.items():
            own = tokens
            if len(part.indexes) < len(self.requests):
                own = b"".join([tokens[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] for i in part.indexes])
            yield front, NextTokens(places=self._places[front], ahead=ahead, tokens=own)


NOBODY = Audience((), ())
"""The one of no request."""
