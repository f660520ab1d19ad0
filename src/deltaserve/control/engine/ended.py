"""What decode has told of its answers, and what it remembers of rooms that are over.

Answers for a while: a front whose connection broke asks for the tail it missed. The numbers of their last attempt
and Submit for longer, of a bounded number of rooms: prefill takes no lower attempt, and an old Submit opens no room.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from deltaserve.core.ids import Attempt, PeerName, Room
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import TOKEN_BYTES, token_len
from deltaserve.core.wire.messages import Finished, Submit, TokenRun, Tokens

ANSWER_KEPT_S = 30.0
_ROOMS_REMEMBERED = 4096
_TOKENS_A_FRAME = 1024
"""Most tokens in one frame: with 20 alternatives each it stays below the limit of a frame."""


@dataclass(frozen=True, slots=True)
class ToldOutput:
    """An answer so far, as its front may ask for it again."""

    front: PeerName
    prompt_len: int
    output: bytes
    """Packed ids, from output position 0 on."""
    first_own: int
    """Output tokens that came with the Submit: those behind them were drawn here."""
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of the tokens drawn here; empty when none were asked for."""

    def continues(self, front: PeerName, submit: Submit) -> bool:
        """Whether it is the answer that the front has the head of."""
        delivered = submit.prompt[submit.prompt_len * TOKEN_BYTES :]
        drawn_here = self.first_own * TOKEN_BYTES <= len(delivered)
        is_same = (front, submit.prompt_len) == (self.front, self.prompt_len)
        return is_same and drawn_here and self.output.startswith(delivered)

    def can_be_told_again(self, front: PeerName, submit: Submit) -> bool:
        """Whether it is all that the front asks for: log-probabilities of the prompt are not remembered."""
        return submit.sampling.prompt_logprobs is None and self.continues(front, submit)

    def behind(self, submit: Submit) -> Iterator[Tokens]:
        """What the front that sent this Submit has not had, in frames of bounded size."""
        start = token_len(submit.prompt) - submit.prompt_len
        for first in range(start, token_len(self.output), _TOKENS_A_FRAME):
            end = first + _TOKENS_A_FRAME
            run = TokenRun(
                room=submit.room,
                epoch=submit.epoch,
                start=first,
                tokens=self.output[first * TOKEN_BYTES : end * TOKEN_BYTES],
                logprobs=self.logprobs[first - self.first_own : end - self.first_own],
            )
            yield Tokens(runs=(run,))


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """A complete answer that is remembered for a while."""

    told: ToldOutput
    finished: Finished


@dataclass(frozen=True, slots=True)
class Former:
    """Numbers of a room that is over."""

    attempt: Attempt
    epoch: int


class EndedRooms:
    """room |-> what is left of it."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Room, Former] = OrderedDict()
        self._answers: OrderedDict[Room, tuple[float, EndedAnswer]] = OrderedDict()

    def add(self, room: Room, numbers: Former, now: float, answer: EndedAnswer | None) -> None:
        self._numbers[room] = numbers
        while len(self._numbers) > _ROOMS_REMEMBERED:
            self._answers.pop(self._numbers.popitem(last=False)[0], None)
        if answer is not None:
            self._answers[room] = now + ANSWER_KEPT_S, answer

    def expire(self, now: float) -> None:
        """Forget answers that nobody asked for in time."""
        while self._answers and next(iter(self._answers.values()))[0] <= now:
            self._answers.popitem(last=False)

    def take(self, room: Room) -> Former | None:
        """Forget the room and return its numbers, for a room that is opened again."""
        self._answers.pop(room, None)
        return self._numbers.pop(room, None)

    def epoch(self, room: Room) -> int:
        """Epoch of the last Submit that was taken for the room; 0: none."""
        former = self._numbers.get(room)
        return 0 if former is None else former.epoch

    def answer(self, room: Room) -> EndedAnswer | None:
        known = self._answers.get(room)
        return None if known is None else known[1]

    def asked_again(self, room: Room, epoch: int) -> None:
        """The front's latest Submit for it."""
        former = self._numbers[room]
        self._numbers[room] = Former(former.attempt, epoch)
