"""What may go wrong, as data: fault kinds, their rates in one run, and what they do to frames and writes."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from deltaserve.core.ids import PeerName
from deltaserve.core.transport import WriteState
from deltaserve.core.wire.codec import LARGE_FRAME_BYTES
from deltaserve.sim.chance import Chance
from deltaserve.sim.loopback import Fate, Part, Posted


class FaultKind(Enum):
    """Rows of the fault model. Where it is drawn: per frame, per write, per step, or at a chosen event."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    REPLAY = "replay"
    """A frame of long ago comes again: stale boots, dead rooms, closed tickets."""
    CORRUPT = "corrupt"
    OVERSIZE = "oversize"

    LATE_LANDING = "late_landing"
    SLOW_DATA = "slow_data"
    PARTIAL_LANDING = "partial_landing"
    ERROR_LANDS_LATER = "error_lands_later"
    COMPLETION_LOST = "completion_lost"
    NOTIFICATION_LOST = "notification_lost"
    POST_REFUSED = "post_refused"
    COMPLETION_FIRST = "completion_first"
    """DONE before the bytes: only on transports that admit it (`Evidence.CONTENTS`)."""
    NOTIFICATION_FIRST = "notification_first"

    OPEN_FAILS = "open_fails"
    ATTACH_FAILS = "attach_fails"

    WRONG_PLAN = "wrong_plan"
    """What a staged write says of its bytes is not what its ticket was granted."""

    SLOT_FAILS = "slot_fails"
    """A slot of the file under a tree cannot be written, or read."""
    SLOT_SPOILS = "slot_spoils"
    """What is written there is not what a reader finds."""

    NON_FINITE = "non_finite"

    RESET = "reset"
    HALF_OPEN = "half_open"
    PARTITION = "partition"
    CLOG = "clog"
    CRASH = "crash"
    CRASH_UNSEEN = "crash_unseen"
    """Nobody tells the others that the process has ended."""
    CRASH_LOOP = "crash_loop"
    """A worker ends again soon after it has started, three or four times."""
    FRONT_CRASH = "front_crash"
    PAUSE = "pause"
    SLOW_PROCESS = "slow_process"
    CLOCK_JUMP = "clock_jump"
    DRAIN = "drain"
    LATE_REGISTRATION = "late_registration"
    MOVE = "move"
    """A worker starts again at another address: its port was taken meanwhile."""
    MISFIT = "misfit"
    """A worker starts again with another model, and then once more with the right one."""

    RANK_LATE = "rank_late"
    """One rank of a worker moves nothing for up to half a minute."""

    RANK_CRASH = "rank_crash"
    """One rank of a worker ends; the worker ends of it a moment later, and its other ranks after that."""

    RANK_MISLED = "rank_misled"
    """Something that a rank is told is lost, comes late, or is something else."""

    CLIENT_LEAVES = "client_leaves"
    STOP_STRING = "stop_string"
    DUPLICATE_SUBMIT = "duplicate_submit"
    BAD_INPUT = "bad_input"
    SHORT_DEADLINE = "short_deadline"
    BURST = "burst"
    FLUSH = "flush"
    """An operator has every tree emptied of what no request holds."""
    ROLE = "role"
    """An operator makes a decode worker of a prefill worker, or the other way round."""
    LEAVE = "leave"
    """A worker leaves: fronts are told to forget it, and it ends when all have; later it joins again, or another one of
    its name, maybe at another address."""
    ROLLOUT = "rollout"
    """A step of an exchange of all workers for those of another revision: one joins, or one leaves for good."""


FRAME_FAULTS = (
    FaultKind.DROP,
    FaultKind.DUPLICATE,
    FaultKind.DELAY,
    FaultKind.REPLAY,
    FaultKind.CORRUPT,
    FaultKind.OVERSIZE,
)
WRITE_FAULTS = (
    FaultKind.LATE_LANDING,
    FaultKind.SLOW_DATA,
    FaultKind.PARTIAL_LANDING,
    FaultKind.ERROR_LANDS_LATER,
    FaultKind.COMPLETION_LOST,
    FaultKind.NOTIFICATION_LOST,
    FaultKind.POST_REFUSED,
)
UNPROVEN_FAULTS = (FaultKind.COMPLETION_FIRST, FaultKind.NOTIFICATION_FIRST)
ENDPOINT_FAULTS = (FaultKind.OPEN_FAILS, FaultKind.ATTACH_FAILS)
PLAN_FAULTS = (FaultKind.WRONG_PLAN,)
SLOT_FAULTS = (FaultKind.SLOT_FAILS, FaultKind.SLOT_SPOILS)
PROCESS_FAULTS = (
    FaultKind.RESET,
    FaultKind.HALF_OPEN,
    FaultKind.PARTITION,
    FaultKind.CLOG,
    FaultKind.CRASH,
    FaultKind.CRASH_UNSEEN,
    FaultKind.FRONT_CRASH,
    FaultKind.PAUSE,
    FaultKind.SLOW_PROCESS,
    FaultKind.CLOCK_JUMP,
    FaultKind.DRAIN,
)
LIFE_FAULTS = (FaultKind.CRASH_LOOP,)
RANK_FAULTS = (FaultKind.RANK_LATE, FaultKind.RANK_CRASH, FaultKind.RANK_MISLED)
"""Faults of workers of several ranks."""
CLIENT_FAULTS = (FaultKind.CLIENT_LEAVES, FaultKind.STOP_STRING, FaultKind.DUPLICATE_SUBMIT)

_Connection = tuple[PeerName, PeerName]
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class FrameCopy:
    """One copy of a frame on its way."""

    frame: bytes
    delay: float


@dataclass(slots=True)
class LinkFaults:
    """What becomes of frames. `heal` ends all of it."""

    rates: Mapping[FaultKind, float]
    chance: Chance
    counts: Counter[FaultKind]
    delay_s: float = 0.0005
    sick: PeerName | None = None
    """Only frames from or to it meet faults; None: all do."""
    bytes_per_s: float | None = None
    """Bandwidth of each connection, each way: frames go one after the other. None: unlimited."""
    life_lag_s: float = 0.0
    """Each life of a process has connections of its own, which are slower than others by up to so much."""
    _lags: dict[PeerName, float] = field(default_factory=dict)
    _busy_until: dict[_Connection, float] = field(default_factory=dict)
    dead_until: dict[_Connection, float] = field(default_factory=dict)
    clogged_until: dict[_Connection, float] = field(default_factory=dict)
    _past: dict[_Connection, deque[bytes]] = field(default_factory=dict)

    def heal(self) -> None:
        self.rates = {}
        self.life_lag_s = 0.0
        self._lags.clear()
        self.dead_until.clear()
        self.clogged_until.clear()

    def begin_life(self, name: PeerName) -> None:
        """Note that a process has started."""
        if self.life_lag_s:
            self._lags[name] = self.chance.uniform(0.0, self.life_lag_s)

    def copies(self, src: PeerName, dst: PeerName, frame: bytes, now: float) -> list[FrameCopy]:
        """The copies that will arrive."""
        connection = (src, dst)
        if now < self.dead_until.get(connection, 0.0):
            return []
        delay = self.chance.exponential(self.delay_s) + self._carried_s(connection, frame, now)
        delay += self._lags.get(src, 0.0)
        clogged_s = self.clogged_until.get(connection, 0.0) - now
        if clogged_s > 0:
            delay += clogged_s
        if not self.rates or (self.sick is not None and self.sick not in connection):
            return [FrameCopy(frame, delay)]
        copies = self._disturbed(frame, delay)
        past = self._past.setdefault(connection, deque(maxlen=_REMEMBERED))
        if past and self._strikes(FaultKind.REPLAY):
            copies.append(FrameCopy(self.chance.choose(past), delay))
        past.append(frame)
        return copies

    def _carried_s(self, connection: _Connection, frame: bytes, now: float) -> float:
        if self.bytes_per_s is None:
            return 0.0
        over = max(now, self._busy_until.get(connection, 0.0)) + len(frame) / self.bytes_per_s
        self._busy_until[connection] = over
        return over - now

    def _disturbed(self, frame: bytes, delay: float) -> list[FrameCopy]:
        if self._strikes(FaultKind.DROP):
            return []
        if self._strikes(FaultKind.DELAY):
            delay += self.chance.exponential(self.chance.log_uniform(0.01, 3.0))
        if self._strikes(FaultKind.CORRUPT):
            at = self.chance.below(len(frame))
            frame = frame[:at] + bytes([frame[at] ^ (1 + self.chance.below(255))]) + frame[at + 1 :]
        if self._strikes(FaultKind.OVERSIZE):
            frame = frame + bytes(LARGE_FRAME_BYTES)
        copies = [FrameCopy(frame, delay)]
        if self._strikes(FaultKind.DUPLICATE):
            copies.append(FrameCopy(frame, delay + self.chance.exponential(0.01)))
        return copies

    def _strikes(self, kind: FaultKind) -> bool:
        if not self.chance.hits(self.rates.get(kind, 0.0)):
            return False
        self.counts[kind] += 1
        return True


@dataclass(slots=True)
class EndpointFaults:
    """What becomes of attempts to open an endpoint and to attach it."""

    rates: Mapping[FaultKind, float]
    chance: Chance
    counts: Counter[FaultKind]

    def heal(self) -> None:
        self.rates = {}

    def refuses(self, kind: FaultKind) -> bool:
        refused = self.chance.hits(self.rates.get(kind, 0.0))
        self.counts[kind] += refused
        return refused


def never(kind: FaultKind) -> bool:
    """What becomes of attempts in a world without faults."""
    return False


@dataclass(slots=True)
class WriteFaults:
    """What becomes of writes. Those posted before `heal` keep their fate."""

    rates: Mapping[FaultKind, float]
    chance: Chance
    counts: Counter[FaultKind]
    land_s: float = 0.001
    bytes_per_s: float | None = None
    """Bandwidth of each worker's network card, each way. None: writes take no time of each other's."""
    sick: PeerName | None = None
    """Only writes from or to it meet faults; None: all do."""
    _busy_until: dict[tuple[PeerName, str], float] = field(default_factory=dict)

    def heal(self) -> None:
        self.rates = {}

    def fate(self, posted: Posted) -> Fate | None:
        """What becomes of a write: the loopback fabric's policy."""
        if self.sick is not None and self.sick not in (posted.src, posted.dst):
            return self._healthy(posted, 1.0)
        for kind, rate in self.rates.items():
            if self.chance.hits(rate):
                self.counts[kind] += 1
                return self._faulty(kind, posted)
        return self._healthy(posted, 1.0)

    def _healthy(self, posted: Posted, slowness: float) -> Fate:
        lands = self.chance.exponential(self.land_s) * slowness + self._carried_s(posted) * slowness
        told = lands + self.chance.exponential(0.001)
        notified = lands + self.chance.exponential(0.001)
        return Fate(self._parts(posted, lands), notified, told)

    def _carried_s(self, posted: Posted) -> float:
        """Seconds until the cards of both ends are free and have carried it: writes of one card go one after the
        other."""
        if self.bytes_per_s is None:
            return 0.0
        ends = (posted.src, "out"), (posted.dst, "in")
        start = max(posted.now, *(self._busy_until.get(end, 0.0) for end in ends))
        over = start + posted.num_bytes / self.bytes_per_s
        self._busy_until.update(dict.fromkeys(ends, over))
        return over - posted.now

    def _parts(self, posted: Posted, last: float) -> tuple[Part, ...]:
        if posted.num_copies < 2:
            return (Part(last),)
        return (Part(last * self.chance.random(), 1 + self.chance.below(posted.num_copies - 1)), Part(last))

    def _faulty(self, kind: FaultKind, posted: Posted) -> Fate | None:
        late, soon = self.chance.uniform(0.05, 2.0), self.chance.exponential(0.003)
        match kind:
            case FaultKind.SLOW_DATA:
                return self._healthy(posted, 100.0)
            case FaultKind.PARTIAL_LANDING:
                landed = self.chance.below(max(1, posted.num_copies))
                return Fate((Part(soon, landed),), None, soon + late, WriteState.ERROR)
            case FaultKind.ERROR_LANDS_LATER:
                notified = late if self.chance.hits(0.5) else None
                return Fate(self._parts(posted, late), notified, soon, WriteState.ERROR)
            case FaultKind.COMPLETION_LOST:
                return Fate(self._parts(posted, soon), soon, None)
            case FaultKind.NOTIFICATION_LOST:
                return Fate(self._parts(posted, soon), None, soon)
            case FaultKind.POST_REFUSED:
                return None
            case FaultKind.COMPLETION_FIRST:
                return Fate(self._parts(posted, late), late, soon)
            case FaultKind.NOTIFICATION_FIRST:
                return Fate(self._parts(posted, late), soon, late)
            case _:
                return Fate(self._parts(posted, late), late, late)
