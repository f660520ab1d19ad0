"""What an instance knows of a room, and what decode tells the front about it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from deltaserve.control.engine.audience import NOBODY, Audience
from deltaserve.control.engine.ended import EndedAnswer, EndedRooms, Former, ToldOutput
from deltaserve.control.engine.near import Weighing
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.status import DECODE_TABLE, DecodeEvent, DecodeState, PrefillState
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.sched.plan import Sampled
from deltaserve.control.sched.request import Request
from deltaserve.control.transfer.receiver import Ticket
from deltaserve.control.transfer.sender import SendTicket
from deltaserve.core.errors import FailReason
from deltaserve.core.hints import HintAnswer
from deltaserve.core.ids import Attempt, Namespace, PeerName, Room
from deltaserve.core.machine import advance
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.first_token import FirstToken
from deltaserve.core.wire.messages import (
    MAX_LOGPROB_POSITIONS,
    Finished,
    FinishReason,
    NextTokens,
    Offer,
    PromptLogprobs,
    Submit,
    TokenRun,
    Tokens,
    Usage,
)

_QUESTION_S = 2.0
"""Seconds between two announcements of a room that waits for its grant: decode answers with the grant, or that it is
over."""
_LONGEST_MS = 2**32
"""Longer deadlines count as this one (seven weeks): what is left of them is told on, and must fit a frame."""


@dataclass(slots=True, eq=False)
class PrefillRoom:
    """All this worker knows of a room; dropped when it ends."""

    peer: PeerName
    room: Room
    attempt: Attempt
    request: Request
    num_tokens: int
    """Tokens of this attempt's prompt."""
    state: PrefillState = PrefillState.QUEUED
    is_announced: bool = False
    """Whether Starting was sent."""
    is_answered: bool = False
    """Whether the room was announced and waits for its grant no more."""
    cached_len: int = 0
    sent_bytes: int = 0
    """What has arrived of its pages."""
    first: FirstToken | None = None
    ticket: SendTicket | None = None
    _next_question: float | None = None

    def asks_again(self, now: float) -> bool:
        """Whether decode has said nothing for so long that it may not want the room any more."""
        is_due = self._next_question is not None and now >= self._next_question
        if is_due or self._next_question is None:
            self._next_question = now + _QUESTION_S
        return is_due


@dataclass(slots=True)
class Timeline:
    """When what happened, on this process's clock; None: not yet, or never."""

    submitted: float
    started: float | None = None
    granted: float | None = None
    landed: float | None = None
    running: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class DecodeRoom:
    """All this worker knows of a room; dropped when it ends."""

    front: PeerName
    room: Room
    submit: Submit
    request: Request
    attempt: Attempt
    times: Timeline
    state: DecodeState
    prefill: PeerName | None = None
    """Worker that the current attempt was offered to; None: computed here."""
    ticket: Ticket | None = None
    attempt_len: int = 0
    """Tokens of the current attempt's prompt."""
    offered_at: float = 0.0
    is_queued: bool = False
    """Prefill has acknowledged the offer."""
    leased_version: int | None = None
    """Version of the cache when the lease was last compared with it."""
    sent_at: float | None = None
    """When prefill first said that it had sent everything of the current ticket."""
    next_repeat: float = 0.0
    repeat_gap_s: float = 1.0
    waits_since: float | None = None
    """When it began to wait for another request's transfer of the same pages; None: it does not."""
    finish_len: int | None = None
    """The front found a stop string: output tokens to keep, once the step in flight is committed."""
    weighing: Weighing | None = None
    """Where its prompt was to be computed, and why; None: that was no question."""
    held_len: int = 0
    """Tokens at the beginning of the current attempt's prompt that prefill may ask for."""
    num_turns: int = 1
    """Turns of its conversation with this one, as far as they are known here."""
    decode_cached_len: int = 0
    prefill_cached_len: int = 0
    prefill_loaded_len: int = 0
    prefill_pulled_len: int = 0
    transferred_bytes: int = 0
    transferred_state_bytes: int = 0
    arrived: FirstToken | None = None
    """The first token, held back until the prompt's log-probabilities are here."""
    num_prompt_logprobs: int = 0
    """Prompt log-probabilities told to the front so far: those of positions 1, 2, ..."""
    lost_behind: int | None = None
    """How many were told when it was last found that the next one is lost."""
    epoch: int = 0
    """Epoch of the latest Submit."""
    first_own: int = 0
    """Output tokens that came with the first Submit; those behind them are drawn here."""
    hints: tuple[HintAnswer, ...] = ()
    """What becomes of each hint that was given."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens drawn here, when they were asked for."""

    def told(self) -> ToldOutput:
        """The output so far, as the front may ask for it again."""
        prompt_len = self.request.prompt_len
        output = bytes(self.request.tokens[prompt_len * TOKEN_BYTES :])
        return ToldOutput(self.front, prompt_len, output, self.first_own, tuple(self.logprobs))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some asked-for ones are still to come: the first token must not overtake them."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def misses_prompt_logprobs(self) -> bool:
        """Whether some were lost on the way, as far as is known."""
        is_found = self.arrived is not None or self.lost_behind == self.num_prompt_logprobs
        return self.lacks_prompt_logprobs and is_found

    def new_prompt_logprobs(self, start: int, values: tuple[TokenLogprobs, ...]) -> tuple[PromptLogprobs, ...] | None:
        """What of these is to be told next, nothing for a repeat; None when some before them are missing.

        Once all are told the request asks for none. Where it goes on behind tokens prefill computes theirs, too: those
        are not the prompt's.
        """
        values = values[: max(0, self.request.prompt_len - start)]
        known = self.num_prompt_logprobs + 1 - start
        if not self.lacks_prompt_logprobs or known >= len(values):
            return ()
        if known < 0:
            return None
        first = self.num_prompt_logprobs + 1
        self.num_prompt_logprobs += len(values) - known
        if self.num_prompt_logprobs >= self.request.prompt_len - 1:
            self.request.ask_no_prompt_logprobs()
        return prompt_logprobs_frames(self.room, first, values[known:])

    @property
    def is_near(self) -> bool:
        """Whether its prompt is to be computed here although prefill could."""
        return self.weighing is not None and self.weighing.is_near and not self.has_output

    @property
    def has_output(self) -> bool:
        return self.request.output_len > 0

    def move(self, event: DecodeEvent) -> None:
        self.state = advance(DECODE_TABLE, self.state, event, f"room {self.room.hex()[:8]} on decode")

    def usage(self, now: float) -> Usage:
        t = self.times
        return Usage(
            prompt_len=self.request.prompt_len,
            output_len=self.request.output_len,
            decode_cached_len=(decode_len := min(self.decode_cached_len, self.request.prompt_len)),
            prefill_cached_len=(prefill_len := min(self.prefill_cached_len, self.request.prompt_len)),
            decode_loaded_len=min(self.request.loaded_len, decode_len),
            prefill_loaded_len=min(self.prefill_loaded_len, prefill_len),
            prefill_pulled_len=min(self.prefill_pulled_len, prefill_len),
            num_retractions=self.request.num_retractions,
            weighed=None if self.weighing is None else self.weighing.weighed(),
            transferred_bytes=self.transferred_bytes,
            transferred_state_bytes=self.transferred_state_bytes,
            num_rounds=self.request.guesses.num_rounds,
            num_drafts=self.request.guesses.num_verified,
            num_accepted=self.request.guesses.num_right,
            queue_s=_span(t.submitted, t.started or t.running),
            prefill_s=_span(t.started, t.landed),
            transfer_s=_span(t.granted, t.landed),
            decode_queue_s=_span(t.landed or t.submitted, t.running),
            hints=self.hints,
            first_token_s=_span(t.submitted, t.first_token),
        )


def _span(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) if start is not None and end is not None else 0.0


@dataclass(slots=True)
class _Gathered:
    """Tokens of one step for one front."""

    runs: list[TokenRun] = field(default_factory=list)
    next: NextTokens | None = None


@dataclass(slots=True)
class ToFronts:
    """Tokens of one step, gathered into one frame per front; endings right behind them."""

    links: PeerLinks
    gathered: dict[PeerName, _Gathered] = field(default_factory=dict)
    ready: list[tuple[PeerName, Tokens]] = field(default_factory=list)
    """What earlier steps of the same turn drew."""

    def token(self, room: DecodeRoom, sampled: Sampled, now: float) -> None:
        """The request's newest token goes out."""
        is_first = room.times.first_token is None
        if is_first:
            room.times.first_token = now
        if sampled.logprobs is not None:
            room.logprobs.append(sampled.logprobs)
        run = TokenRun(
            room=room.room,
            epoch=room.epoch,
            start=room.request.output_len - 1,
            tokens=bytes(room.request.tokens[-TOKEN_BYTES:]),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            usage=room.usage(now) if is_first else None,
        )
        self._of(room.front).runs.append(run)

    def decoded(self, audience: Audience, tokens: bytes) -> None:
        """The newest tokens of all rooms of `audience` go out, one each."""
        for front, message in audience.messages(tokens):
            self._of(front).next = message

    def _of(self, front: PeerName) -> _Gathered:
        """What is gathered for a front; a room's next tokens are read last, so what follows them is another frame."""
        gathered = self.gathered.get(front)
        if gathered is not None and gathered.next is not None:
            self._close(front, gathered)
            gathered = None
        if gathered is None:
            gathered = self.gathered[front] = _Gathered()
        return gathered

    def _close(self, front: PeerName, gathered: _Gathered) -> None:
        self.ready.append((front, Tokens(runs=tuple(gathered.runs), next=gathered.next)))

    def refused(self, front: PeerName, submit: Submit, reason: FailReason, message: str, turn: EngineTurn) -> None:
        """A room that was never opened."""
        usage = Usage(prompt_len=submit.prompt_len, output_len=0)
        self.links.send(front, _failure(submit.room, submit.epoch, usage, reason, message), turn)

    def repeat(self, told: ToldOutput, submit: Submit, turn: EngineTurn) -> None:
        """Tell again what the front of this Submit does not have."""
        for frame in told.behind(submit):
            self.links.send(told.front, frame, turn)

    def repeat_ended(self, answer: EndedAnswer, submit: Submit, turn: EngineTurn) -> None:
        """Tell the tail of an answer again, and its end."""
        self.repeat(answer.told, submit, turn)
        self.links.send(answer.told.front, msgspec.structs.replace(answer.finished, epoch=submit.epoch), turn)

    def flush(self, turn: EngineTurn) -> None:
        for front, gathered in self.gathered.items():
            self._close(front, gathered)
        self.gathered.clear()
        ready, self.ready = self.ready, []
        for front, tokens in ready:
            self.links.send(front, tokens, turn)

    def finished(self, room: DecodeRoom, finish: FinishReason, turn: EngineTurn) -> EndedAnswer:
        """The answer is complete: what its front may ask for again."""
        self.flush(turn)
        ended = Finished(room=room.room, epoch=room.epoch, usage=room.usage(turn.now), finish=finish)
        self.links.send(room.front, ended, turn)
        return EndedAnswer(room.told(), ended)

    def failed(self, room: DecodeRoom, reason: FailReason, message: str, turn: EngineTurn) -> None:
        self.flush(turn)
        self.links.send(room.front, _failure(room.room, room.epoch, room.usage(turn.now), reason, message), turn)


RETRYABLE = frozenset(
    {
        FailReason.TRANSFER_FAILED,
        FailReason.PEER_LOST,
        FailReason.PEER_FENCED,
        FailReason.OVERLOADED,
        FailReason.DRAINING,
        FailReason.NO_PEER,
        FailReason.CANCELLED,
        FailReason.NUMERICAL,
    }
)
"""Failures that another try may not have."""


def _failure(room: bytes, epoch: int, usage: Usage, reason: FailReason, message: str) -> Finished:
    retryable = reason in RETRYABLE
    return Finished(room=room, epoch=epoch, usage=usage, reason=reason, message=message, retryable=retryable)


def prompt_logprobs_frames(room: Room, start: int, values: tuple[TokenLogprobs, ...]) -> tuple[PromptLogprobs, ...]:
    """Log-probabilities of positions start, start + 1, ... in frames of a length that may be sent."""
    cuts = range(0, len(values), MAX_LOGPROB_POSITIONS)
    return tuple(
        PromptLogprobs(room=room, start=start + cut, values=values[cut : cut + MAX_LOGPROB_POSITIONS]) for cut in cuts
    )


def make_request(asked: Submit | Offer, keys: bytes, now: float) -> Request:
    """The scheduler's object for what a front or a decode worker asks for. `keys`: of its leading full pages here."""
    return Request(
        room=Room(asked.room),
        namespace=Namespace(asked.namespace),
        sampling=asked.sampling,
        prompt_len=asked.prompt_len,
        tokens=bytearray(asked.prompt),
        keys=bytearray(keys),
        arrival=now,
        deadline=now + min(asked.remaining_ms, _LONGEST_MS) / 1000,
        cache=asked.cache,
        hints=asked.hints,
        priority=asked.priority,
    )


class RoomBook:
    """Decode's rooms by id and by request, and what is left of those that are over."""

    def __init__(self) -> None:
        self._rooms: dict[Room, DecodeRoom] = {}
        self._by_request: dict[Request, DecodeRoom] = {}
        self._audience = NOBODY
        self.ended = EndedRooms()

    def open(self, front: PeerName, submit: Submit, now: float) -> DecodeRoom:
        """A room's attempts are numbered on when the front sends it again after a failure."""
        request = make_request(submit, submit.keys, now)
        if submit.prompt_len == 1:  # no position of it has a log-probability
            request.ask_no_prompt_logprobs()
        former = self.ended.take(request.room)
        attempt = Attempt(1 if former is None else former.attempt + 1)
        room = DecodeRoom(front, request.room, submit, request, attempt, Timeline(now), DecodeState.OFFERED)
        room.epoch, room.first_own = submit.epoch, request.output_len
        self._rooms[room.room] = room
        self._by_request[request] = room
        return room

    def close(self, room: DecodeRoom, now: float, answer: EndedAnswer | None) -> None:
        """`answer`: a complete one, which its front may ask for again."""
        self.ended.add(room.room, Former(room.attempt, room.epoch), now, answer)
        del self._rooms[room.room]
        del self._by_request[room.request]

    def get(self, room: bytes) -> DecodeRoom | None:
        return self._rooms.get(Room(room))

    def of_request(self, request: Request) -> DecodeRoom | None:
        return self._by_request.get(request)

    def audience(self, requests: Sequence[Request]) -> Audience:
        """Who hears of these, which have each drawn one more token; the same as before while they are the same."""
        if not self._audience.fits(requests):
            self._audience = Audience(requests, map(self._by_request.get, requests))
        return self._audience

    def renumber(self, room: DecodeRoom, epoch: int) -> None:
        """The front's latest Submit for a room that is here."""
        room.epoch = epoch
        self._audience = NOBODY

    def fronts(self) -> set[PeerName]:
        """Names of the fronts that have rooms here."""
        return {room.front for room in self._rooms.values()}

    def __iter__(self) -> Iterator[DecodeRoom]:
        return iter(list(self._rooms.values()))

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: bytes) -> bool:
        return Room(room) in self._rooms
