"""The rooms of the front: what each one got so far, by when it must end, and which rooms are over.

WAITING --tokens--> STREAMING --finish--> FINISHING        a room that ended is not in the table

A room that WAITS or STREAMS may be between workers: it has no placement then, and goes on where a worker is found.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from deltaserve.control.front.client import Generation, OutputDelta
from deltaserve.control.front.retry import Retries
from deltaserve.control.peer.revision import Revision
from deltaserve.control.sched.ending import finish_of
from deltaserve.core.errors import IntegrityError
from deltaserve.core.hints import HintAnswer, HintOutcome
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.keys import PromptKeys
from deltaserve.core.machine import Table, advance
from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import CacheUse, FinishReason, PrefillWay, Usage

_LOST = "decode was lost before it told the end"


class RoomState(Enum):
    WAITING = "waiting"
    """Submitted; no token came yet."""
    STREAMING = "streaming"
    FINISHING = "finishing"
    """The client has all it wants; decode's Finished is awaited for its usage."""


class RoomEvent(Enum):
    TOKENS = "tokens"
    FINISH = "finish"
    RESUBMIT = "resubmit"


ROOM_TRANSITIONS: Table[RoomState, RoomEvent] = {
    RoomState.WAITING: {
        RoomEvent.TOKENS: RoomState.STREAMING,
        RoomEvent.FINISH: RoomState.FINISHING,
        RoomEvent.RESUBMIT: RoomState.WAITING,
    },
    RoomState.STREAMING: {
        RoomEvent.TOKENS: RoomState.STREAMING,
        RoomEvent.FINISH: RoomState.FINISHING,
        RoomEvent.RESUBMIT: RoomState.STREAMING,
    },
    RoomState.FINISHING: {
        RoomEvent.TOKENS: RoomState.FINISHING,
        RoomEvent.FINISH: RoomState.FINISHING,
    },
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a room was submitted, and what it was expected to use there."""

    decode: PeerName
    prefill: PeerName | None
    """Worker that computes the prompt; None: decode does itself."""
    compute_tokens: int
    """Tokens to compute: prompt minus what the computing worker was believed to hold."""
    memory_tokens: int
    """Tokens of the prompt for which decode needs new memory."""
    output_tokens: int
    """Output tokens that are expected."""
    prefill_way: PrefillWay | None = None
    """What is to be done until prefill would hand the prompt over; None: decode is not to ask itself."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that prefill computes per second; None: not measured."""

    @property
    def computing(self) -> PeerName:
        """The worker that computes the prompt."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def workers(self) -> tuple[PeerName, ...]:
        """All workers that have a part in it."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class KeyedSample:
    """What is to be generated, with the page keys of its prompt."""

    generation: Generation
    keys: PromptKeys
    revision: Revision | None = None
    """The only one whose workers may serve it, because it has begun there. None: any."""

    def may_use(self, revision: Revision | None) -> bool:
        return self.revision is None or self.revision == revision

    @property
    def prompt_len(self) -> int:
        return token_len(self.generation.prompt)

    @property
    def total_len(self) -> int:
        """Prompt and the longest output."""
        return self.prompt_len + self.generation.sampling.max_tokens

    @property
    def recomputes(self) -> bool:
        """Prompt logprobs need every position computed: no hit counts where the prompt is computed."""
        return self.generation.sampling.prompt_logprobs is not None

    def alone(self) -> "KeyedSample":
        """The sample, computed without anything that others have computed."""
        return replace(self, generation=replace(self.generation, cache=CacheUse.BYPASS))


@dataclass(slots=True)
class LiveRoom:
    """One sample on its way. Times are the driver's seconds."""

    sample: KeyedSample
    deadline: float
    submitted_at: float
    placement: Placement | None
    """Where it was submitted last; None: nobody is there to begin or to go on with it."""
    state: RoomState = RoomState.WAITING
    output: list[int] = field(default_factory=list)
    """Tokens taken so far. What comes next must continue them; a worker that goes on is given them."""
    epoch: int = 0
    """How often it was submitted: what bears another number is not an answer to the last Submit."""
    is_computing: bool = True
    """Whether no token came since it was placed: its prompt is still to be computed there."""
    rests_until: float = 0.0
    """Time before which the room is not placed again."""
    num_prompt_logprobs: int = 1
    """Prompt position expected next; position 0 has none."""
    held: list[OutputDelta] = field(default_factory=list)
    """Tokens that wait for prompt logprobs."""
    first_token_s: float = 0.0
    unplaced_since: float | None = None
    """When it lost its placement; None: it is placed, or was given its first token."""
    worker_wait_s: float = 0.0
    """Seconds without a placement before its first token."""
    retries: Retries = field(default_factory=Retries)
    quiet_since: float = 0.0
    """When the room was last submitted to decode, or decode last told of it."""
    num_repeats: int = 0
    """Submits repeated since decode last told of the room."""

    @property
    def room(self) -> Room:
        return self.sample.generation.room

    @property
    def prompt_len(self) -> int:
        return self.sample.prompt_len

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether all that were asked for came."""
        return not self.sample.recomputes or self.num_prompt_logprobs >= self.prompt_len

    @property
    def num_tokens(self) -> int:
        """Output tokens taken so far: the start expected next."""
        return len(self.output)

    @property
    def is_started(self) -> bool:
        """Whether a token came."""
        return self.state is not RoomState.WAITING

    @property
    def finish(self) -> FinishReason | None:
        """Why the output is complete as it is, though decode's Finished has not come; None: it is not."""
        if not self.output or not self.has_prompt_logprobs:
            return None
        return finish_of(self.sample.generation.sampling, len(self.output), self.output[-1])

    def expects(self, decode: PeerName, epoch: int, start: int) -> bool:
        """Whether a token of output position `start` is the next one, and there is nothing to it but to take it."""
        is_streaming = self.state is RoomState.STREAMING and not self.is_computing and not self.held
        is_next = epoch == self.epoch and start == len(self.output)
        return is_next and is_streaming and self.is_on(decode) and self.has_prompt_logprobs

    def contradicts(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether tokens [start, start + n) are others than those taken before."""
        known = self.output[start : start + len(tokens)]
        return known != list(tokens[: len(known)])

    def begins_on(self, revision: Revision | None) -> None:
        """Something of the answer is computed by a revision: no other one may go on with it."""
        if self.sample.revision is None:
            self.sample = replace(self.sample, revision=revision)

    def forget_held(self) -> None:
        """Tokens that were not delivered, because prompt logprobs are missing, are to be generated anew with those."""
        if not self.has_prompt_logprobs:
            self.output.clear()
            self.held.clear()
            if self.num_prompt_logprobs == 1:
                self.sample = replace(self.sample, revision=None)

    def heard(self, now: float) -> None:
        """Note that decode has the room."""
        self.quiet_since, self.num_repeats = now, 0

    def may_be_lost(self, now: float, after_s: float) -> bool:
        """Whether decode has been silent for so long that a frame of this room may be gone; twice as long each time."""
        return now - self.quiet_since >= after_s * (1 << self.num_repeats)

    def is_on(self, decode: PeerName) -> bool:
        """Whether it is placed on that decode worker."""
        return self.placement is not None and self.placement.decode == decode

    def move(self, event: RoomEvent) -> None:
        """Raises StateError for an event the table has no cell for; nothing changes then."""
        self.state = advance(ROOM_TRANSITIONS, self.state, event, f"room {self.room.hex()}")

    def own_usage(self) -> Usage:
        """What the front itself can say, when decode cannot any more. What that said of hints before its end is not
        taken for more than it was."""
        hints = tuple(
            HintAnswer(hint=hint, outcome=HintOutcome.REFUSED, reason=_LOST)
            for hint in self.sample.generation.hints.answered
        )
        return self.timed(Usage(prompt_len=self.prompt_len, output_len=self.num_tokens, hints=hints))

    def timed(self, usage: Usage) -> Usage:
        """The usage with the times that the front alone knows."""
        return msgspec.structs.replace(usage, first_token_s=self.first_token_s, worker_wait_s=self.worker_wait_s)

    def unplace(self, now: float) -> None:
        """Note that the room's worker is gone, or could not serve it."""
        self.placement = None
        self.unplaced_since = None if self.is_started else now

    def place(self, placement: Placement, now: float) -> None:
        self.placement, self.is_computing = placement, True
        if self.unplaced_since is not None:
            self.worker_wait_s += now - self.unplaced_since
            self.unplaced_since = None


_SPARE_TIMERS = 64


class Rooms:
    """room |-> LiveRoom, with deadlines."""

    def __init__(self) -> None:
        self._rooms: dict[Room, LiveRoom] = {}
        self._deadlines: list[tuple[float, Room]] = []
        self.num_waiting_tokens = 0
        """Prompt tokens of rooms in WAITING."""
        self.unplaced: dict[Room, LiveRoom] = {}
        """Rooms between workers, in the order in which they lost theirs."""

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[LiveRoom]:
        return iter(list(self._rooms.values()))

    def get(self, room: Room) -> LiveRoom | None:
        return self._rooms.get(room)

    def on(self, worker: PeerName) -> list[LiveRoom]:
        """Rooms placed on a decode worker."""
        return [room for room in self._rooms.values() if room.is_on(worker)]

    def named(self, worker: PeerName) -> list[LiveRoom]:
        """Rooms in whose placement a worker has a part."""
        return [r for r in self._rooms.values() if r.placement is not None and worker in r.placement.workers]

    def add(self, live: LiveRoom) -> None:
        """Precondition: the room is not in the table."""
        self._rooms[live.room] = live
        self.num_waiting_tokens += live.prompt_len
        heapq.heappush(self._deadlines, (live.deadline, live.room))

    def move(self, live: LiveRoom, event: RoomEvent) -> None:
        """Move a room as LiveRoom.move does, and keep the count of waiting tokens."""
        was_waiting = live.state is RoomState.WAITING
        live.move(event)
        if was_waiting and live.state is not RoomState.WAITING:
            self.num_waiting_tokens -= live.prompt_len

    def remove(self, live: LiveRoom) -> None:
        """Remove a room that has ended."""
        del self._rooms[live.room]
        self.unplaced.pop(live.room, None)
        if live.state is RoomState.WAITING:
            self.num_waiting_tokens -= live.prompt_len
        if len(self._deadlines) > 2 * len(self._rooms) + _SPARE_TIMERS:
            self._deadlines = [(r.deadline, r.room) for r in self._rooms.values()]
            heapq.heapify(self._deadlines)

    def overdue(self, now: float) -> list[LiveRoom]:
        """Rooms whose deadline has passed; each is returned once."""
        out: list[LiveRoom] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, room = heapq.heappop(self._deadlines)
            live = self._rooms.get(room)
            if live is not None and live.deadline == deadline:
                out.append(live)
        return out

    def next_deadline(self) -> float | None:
        """Earliest deadline of any room, or of one that ended a short while ago."""
        return self._deadlines[0][0] if self._deadlines else None

    def check_integrity(self) -> None:
        """Raises IntegrityError when counts disagree or a room has no timer."""
        waiting = sum(r.prompt_len for r in self._rooms.values() if r.state is RoomState.WAITING)
        if waiting != self.num_waiting_tokens:
            raise IntegrityError(f"waiting tokens: counted {self.num_waiting_tokens}, found {waiting}")
        if len(self._deadlines) > 2 * len(self._rooms) + _SPARE_TIMERS:
            raise IntegrityError(f"{len(self._deadlines)} timers for {len(self._rooms)} rooms")
        timers = set(self._deadlines)
        for live in self._rooms.values():
            if (live.deadline, live.room) not in timers:
                raise IntegrityError(f"room {live.room.hex()} has no deadline timer")
            if live.output and live.state is RoomState.WAITING:
                raise IntegrityError(f"room {live.room.hex()} waits with {live.num_tokens} tokens delivered")
            if (live.placement is None) != (live.room in self.unplaced):
                raise IntegrityError(f"room {live.room.hex()}: placement {live.placement}, and listed otherwise")
