"""A small run taken apart: every single fault at every moment of it, and pairs of faults.

One prefill and one decode worker, two requests with a common prefix. Moments are counted in the undisturbed run: each
frame sent, each write posted, each event. A fault of its kind is tried at every one of them, in a run of its own. Of
pairs, both strike the ticket protocol (its frames, the writes) or a process. When a first fault leads to a state that
another way has led to already (equal digests of all control planes and of what is on its way, times apart), second
faults from there are not tried again: they are counted as merged.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from deltaserve.control.sched.request import Request
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.wire.codec import decode
from deltaserve.core.wire.messages import Cancel, Drained, Draining, Failed, Grant, Offer, Revoke, Sent, Starting
from deltaserve.sim.chance import Chance
from deltaserve.sim.cluster import Shape
from deltaserve.sim.faults import FRAME_FAULTS, WRITE_FAULTS, FaultKind, FrameCopy, LinkFaults, WriteFaults
from deltaserve.sim.knobs import Knobs, Traffic
from deltaserve.sim.loopback import Fate, Posted
from deltaserve.sim.process import SimWorker
from deltaserve.sim.rig import Report, Run
from deltaserve.sim.trace import Trace
from deltaserve.sim.watch import Watch

SEED = 1
_TICKET_FRAMES = (Offer, Starting, Grant, Revoke, Draining, Drained, Sent, Failed, Cancel)
_DEATHS = (FaultKind.CRASH, FaultKind.CRASH_UNSEEN)
_STRIKES = (*_DEATHS, FaultKind.FRONT_CRASH, FaultKind.PAUSE, FaultKind.RESET, FaultKind.PARTITION, FaultKind.HALF_OPEN)
_CLIENTS = (FaultKind.CLIENT_LEAVES, FaultKind.STOP_STRING)
_FRAMES = tuple(kind for kind in FRAME_FAULTS if kind is not FaultKind.OVERSIZE)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault at one moment. `at`: number of the frame, of the write, or of the event."""

    kind: FaultKind
    at: int
    variant: int = 0
    """Which process or connection, and how long."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What there was to strike at in a run, until its requests had ended."""

    num_frames: int
    ticket_frames: tuple[int, ...]
    num_writes: int
    first_event: int
    num_events: int


@dataclass(slots=True)
class _Links(LinkFaults):
    """Link faults that strike numbered frames."""

    script: dict[int, FaultKind] = field(default_factory=dict)
    number: int = 0
    ticket_frames: list[int] = field(default_factory=list)

    def copies(self, src: PeerName, dst: PeerName, frame: bytes, now: float) -> list[FrameCopy]:
        self.number += 1
        if isinstance(decode(frame).body, _TICKET_FRAMES):
            self.ticket_frames.append(self.number)
        kind = self.script.get(self.number)
        self.rates = {kind: 1.0} if kind is not None else {}
        return LinkFaults.copies(self, src, dst, frame, now)


@dataclass(slots=True)
class _Writes(WriteFaults):
    """Write faults that strike numbered writes."""

    script: dict[int, FaultKind] = field(default_factory=dict)
    number: int = 0

    def fate(self, posted: Posted) -> Fate | None:
        self.number += 1
        kind = self.script.get(self.number)
        self.rates = {kind: 1.0} if kind is not None else {}
        return WriteFaults.fate(self, posted)


def small_knobs() -> Knobs:
    """1 prefill, 1 decode, two requests."""
    shape = Shape(
        decode_pages=12,
        prefill_pages=12,
        context_len=40,
        heartbeat_s=0.1,
        peer_lost_s=0.3,
        peer_suspect_s=0.2,
        peer_lease_s=1.0,
    )
    traffic = Traffic(2, 0.02, largest=24, max_output=4, share=0.9, num_namespaces=1, max_samples=1, oddity=0.0)
    return Knobs(
        shape,
        traffic,
        {},
        (),
        step_s=0.001,
        lag_s=0.0005,
        link_s=0.0005,
        land_s=0.002,
        can_fence=True,
        late_starts=False,
    )


class SmallRun(Run):
    """A run with given strikes and no other fault."""

    def __init__(self, strikes: tuple[Strike, ...], on_event: "MomentRecorder | None" = None) -> None:
        faults: Counter[FaultKind] = Counter()
        frames = {s.at: s.kind for s in strikes if s.kind in FRAME_FAULTS}
        writes = {s.at: s.kind for s in strikes if s.kind in WRITE_FAULTS}
        self.scripted_links = _Links({}, Chance(SEED, "links"), faults, script=frames)
        self.scripted_writes = _Writes({}, Chance(SEED, "writes"), faults, script=writes)
        knobs = small_knobs()
        super().__init__(SEED, knobs, Trace(), Watch(), (self.scripted_links, self.scripted_writes))
        self._strikes = {s.at: s for s in strikes if s.kind not in (*FRAME_FAULTS, *WRITE_FAULTS)}
        self._recorder = on_event

    def _before_event(self, number: int) -> None:
        if self._recorder is not None:
            self._recorder.event(self, number)
        strike = self._strikes.get(number)
        if strike is not None:
            self._disorder.reseed(Chance(strike.variant, "variant"))  # other victims and durations
            self._strike(strike.kind)


class MomentRecorder:
    """Which moments a run had, and the digest of each event's state."""

    def __init__(self) -> None:
        self.digests: dict[int, tuple[int, int, bytes]] = {}
        """Event |-> (frames sent, writes posted, digest) before it."""
        self.moments: Moments | None = None

    def event(self, run: SmallRun, number: int) -> None:
        if self.moments is not None or not run.clients.asked:
            return
        links, writes = run.scripted_links, run.scripted_writes
        if len(run.clients.asked) == run.knobs.traffic.num_requests and run.clients.all_over():
            first = min(self.digests, default=number)
            self.moments = Moments(links.number, tuple(links.ticket_frames), writes.number, first, number)
            return
        self.digests[number] = links.number, writes.number, state_digest(run)


def state_digest(run: Run) -> bytes:
    """Digest of every control plane and everything on its way, without times and generations."""
    state = xxhash.xxh3_128()
    for name, worker in sorted(run.world.workers.items()):
        state.update(repr((name, _worker_state(worker))).encode())
    for front in run.world.fronts.values():
        rooms = [(live.room, live.state, live.num_tokens, live.placement) for live in front.core.rooms]
        peers = [(w.name, w.peer.state) for w in front.core.workers]
        state.update(repr((rooms, peers, front.is_alive)).encode())
    state.update(repr((run.world.frames_on_their_way(), run.world.fabric.on_its_way())).encode())
    return state.digest()


def _worker_state(worker: SimWorker) -> tuple[object, ...]:
    instance, parts = worker.instance, worker.instance.parts
    pages = [pool.states() for pool in parts.pools]
    peers = [(peer.name, peer.state, peer.boot) for peer in instance.links.table]
    serving, outflow = instance.serving, instance.outflow
    tickets: list[tuple[object, ...]] = [(t.id, t.state, t.coverage.num_landed) for t in serving.receiver]
    tickets += [(t.id, t.state, len(t.pins)) for t in outflow.sender]
    rooms: list[tuple[Room, Enum, Request]] = [(r.room, r.state, r.request) for r in serving.rooms]
    rooms += [(r.room, r.state, r.request) for r in outflow.rooms.values()]
    books = [(room, state, request.num_tokens, request.num_computed) for room, state, request in rooms]
    return (
        pages,
        peers,
        tickets,
        books,
        len(parts.scheduler.running),
        all(rank.endpoint.is_idle() for rank in worker.ranks),
    )


def run_small(strikes: tuple[Strike, ...]) -> Report:
    """One run under given strikes. The recorder's view costs time: this one has none."""
    return SmallRun(strikes).judged()


def record(strikes: tuple[Strike, ...] = ()) -> tuple[Report, MomentRecorder]:
    recorder = MomentRecorder()
    return SmallRun(strikes, recorder).judged(), recorder


def single_strikes(moments: Moments) -> Iterator[Strike]:
    """Every fault at every moment."""
    for number in range(1, moments.num_frames + 1):
        yield from (Strike(kind, number) for kind in _FRAMES)
    for number in range(1, moments.num_writes + 1):
        yield from (Strike(kind, number) for kind in WRITE_FAULTS)
    for number in range(moments.first_event, moments.num_events + 1):
        yield from (Strike(kind, number, variant) for kind in _STRIKES for variant in (0, 1))
        yield from (Strike(kind, number) for kind in _CLIENTS)


def paired_strikes(moments: Moments, after: tuple[int, int, int] = (0, 0, 0)) -> Iterator[Strike]:
    """Faults of the ticket protocol and deaths, later than (frames, writes, event)."""
    frames, writes, event = after
    for number in moments.ticket_frames:
        if number > frames:
            yield from (Strike(kind, number) for kind in _FRAMES)
    for number in range(writes + 1, moments.num_writes + 1):
        yield from (Strike(kind, number) for kind in WRITE_FAULTS)
    for number in range(max(event + 1, moments.first_event), moments.num_events + 1):
        yield from (Strike(kind, number, variant) for kind in _DEATHS for variant in (0, 1))


@dataclass(slots=True)
class PairSweep:
    """Second faults after first ones; states that were met before are not left again."""

    seen: set[tuple[bytes, FaultKind, int]] = field(default_factory=set)
    num_merged: int = 0

    def second_strikes(self, first: Strike, recorder: MomentRecorder) -> list[Strike]:
        """Deaths worth trying after `first`, and every later fault of a ticket frame or write."""
        if recorder.moments is None:
            return []
        chosen: list[Strike] = []
        struck = False
        start: tuple[int, int, int] | None = None
        for event, (frames, writes, digest) in recorder.digests.items():
            struck = struck or _is_before(first, frames, writes, event)
            if not struck:
                continue
            start = start or (frames, writes, event)
            for kind in _DEATHS:
                for variant in (0, 1):
                    key = digest, kind, variant
                    if key in self.seen:
                        self.num_merged += 1
                    else:
                        self.seen.add(key)
                        chosen.append(Strike(kind, event, variant))
        if start is not None:
            later = paired_strikes(recorder.moments, start)
            chosen += [strike for strike in later if strike.kind not in _DEATHS]
        return chosen


def _is_before(strike: Strike, frames: int, writes: int, event: int) -> bool:
    if strike.kind in FRAME_FAULTS:
        return frames >= strike.at
    if strike.kind in WRITE_FAULTS:
        return writes >= strike.at
    return event > strike.at
