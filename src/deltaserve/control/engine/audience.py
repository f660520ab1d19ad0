"""Who hears of the rows that decode on and on, and what a frame says of them that stays from step to step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import NextTokens, StreamPlace


class StreamedRoom(Protocol):
    """A request's room, as far as its tokens are told of it."""

    @property
    def request(self) -> Request: ...
    @property
    def room(self) -> Room: ...
    @property
    def front(self) -> PeerName: ...
    @property
    def epoch(self) -> int: ...


@dataclass(slots=True)
class _Part:
    """What of the tokens is one front's."""

    indexes: list[int]
    places: list[StreamPlace]


class Audience:
    """Fronts, each with its rooms among those of some requests that draw a token each in every step."""

    def __init__(self, requests: Sequence[Request], rooms: Iterable[StreamedRoom | None]) -> None:
        """`rooms`: of each of `requests`; None: it has none. Each has drawn its next token already."""
        self.requests = requests
        self._parts: dict[PeerName, _Part] = {}
        stops: set[int] = set()
        for index, one in enumerate(rooms):
            if one is None:
                continue
            part = self._parts.get(one.front)
            if part is None:
                part = self._parts[one.front] = _Part([], [])
            part.indexes.append(index)
            part.places.append(StreamPlace(one.room, one.epoch, one.request.output_len - 1))
            stops.update(one.request.sampling.stop_token_ids)
        self._places = {front: tuple(part.places) for front, part in self._parts.items()}
        self._first_len = requests[0].num_tokens if requests else 0
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
