"""Log-probabilities of prompts that prefill has told, kept to be told again: they take another way than the pages.

A reader that lacks some names the position from which it does; so it acknowledges all before, which are forgotten.
What is kept outlives the room, whose pages may be there before a lost frame is missed. The memory is bounded: beyond
the bound the oldest are forgotten, and whoever lacks those has the prompt computed again.
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Attempt, PeerName, Room
from deltaserve.core.wire.messages import PromptLogprobs

KEPT_S = 30.0
"""Seconds after a room's end until its log-probabilities are forgotten."""
_MAX_NUMBERS = 1 << 18
"""Most numbers kept for all rooms together, some 30 MB: a prompt of 8,192 tokens with 20 alternatives for each has
172,032."""
_MAX_PROMPTS = 4096

Reading = tuple[PeerName, Room]
"""Reader that is told, and room."""


@dataclass(slots=True)
class _Told:
    """What was told of one attempt."""

    attempt: Attempt
    start: int = 1
    """First position that the reader may lack."""
    end: int = 1
    """First position that the reader was not told."""
    frames: deque[PromptLogprobs] = field(default_factory=deque)
    """Frames in order of their positions, up to `end`; those told first may have been forgotten."""
    forget_at: float | None = None
    """When the frames are forgotten; None: not decided yet."""


class KeptLogprobs:
    """Frames by reader and room, the oldest prompt first."""

    def __init__(self, max_numbers: int = _MAX_NUMBERS) -> None:
        self._max_numbers = max_numbers
        self._told: OrderedDict[Reading, _Told] = OrderedDict()
        self.num_numbers = 0
        """How many log-probabilities are in memory."""

    def keep(self, reading: Reading, attempt: Attempt, frames: Iterable[PromptLogprobs]) -> None:
        told = self._told.get(reading)
        if told is None or told.attempt != attempt:
            self.forget(reading)
            told = self._told[reading] = _Told(attempt)
        for frame in frames:
            told.frames.append(frame)
            told.end = _end(frame)
            self.num_numbers += _num_numbers(frame)
        while len(self._told) > _MAX_PROMPTS:
            self.forget(next(iter(self._told)))
        for oldest in self._told.values():
            while oldest.frames and self.num_numbers > self._max_numbers:
                self._drop_first(oldest)

    def again(self, reading: Reading, attempt: Attempt, start: int) -> tuple[PromptLogprobs, ...] | None:
        """What was told from position `start` on, to a reader that has all before. None: some of it is not here."""
        told = self._told.get(reading)
        if told is None or told.attempt != attempt:
            return None
        if start < told.start:
            return ()  # it has said since that it has more
        told.start = min(start, told.end)
        while told.frames and _end(told.frames[0]) <= start:
            self._drop_first(told)
        first = told.frames[0].start if told.frames else told.end
        return None if first > start else tuple(told.frames)

    def forget(self, reading: Reading) -> None:
        """The reader does not want them any more."""
        told = self._told.pop(reading, None)
        while told is not None and told.frames:
            self._drop_first(told)

    def forget_reader(self, reader: PeerName) -> None:
        for reading in [reading for reading in self._told if reading[0] == reader]:
            self.forget(reading)

    def expire(self, rooms: Container[Reading], now: float) -> None:
        """Forget what nobody asked for in time. `rooms`: those that are not over."""
        for reading, told in list(self._told.items()):
            if reading in rooms or told.forget_at is None:
                told.forget_at = now + KEPT_S
            elif now >= told.forget_at:
                self.forget(reading)

    def check_integrity(self) -> None:
        found = sum(_num_numbers(frame) for told in self._told.values() for frame in told.frames)
        if found != self.num_numbers or found > self._max_numbers:
            raise IntegrityError(f"prompt logprobs: {self.num_numbers} counted, {found} kept of {self._max_numbers}")

    def _drop_first(self, told: _Told) -> None:
        self.num_numbers -= _num_numbers(told.frames.popleft())


def _end(frame: PromptLogprobs) -> int:
    return frame.start + len(frame.values)


def _num_numbers(frame: PromptLogprobs) -> int:
    return sum(1 + len(value.top) for value in frame.values)
