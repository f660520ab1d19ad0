"""RouterEngine: FrontCore with real sockets, real time and real clients.

All of it runs in one event loop: frames come from the links' callback, time from one timer, clients are async
generators. FrontCore decides; this file performs. Moments are read from the clock, not from the loop: uvloop's time
stands still while it runs callbacks, and counts whole milliseconds.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import assert_never

from deltaserve.control.front.client import (
    EngineStats,
    Generation,
    Limits,
    NameTaken,
    OutputDelta,
    RoleAnswer,
    RoleRefused,
    WorkerTree,
)
from deltaserve.control.front.events import (
    Deliver,
    Fail,
    FlushAsked,
    FrontAction,
    FrontConfig,
    FrontEvent,
    Member,
    TreesTold,
    WorkerLeaves,
    WorkerUp,
)
from deltaserve.control.front.front_core import FrontCore
from deltaserve.control.front.roster import Changes, Roster
from deltaserve.control.peer.link import Dial, FrameIn, HangUp, LinkBroken, PeerDied, SendFrame
from deltaserve.core.errors import FailReason, IntegrityError
from deltaserve.core.ids import PeerName, Role, Room
from deltaserve.core.wire.messages import Envelope, Submit
from deltaserve.process.front.room_stream import Stream
from deltaserve.process.links.aio import AsyncLinks
from deltaserve.process.links.links import Links
from deltaserve.settings.worker_list import WorkerEntry

_log = logging.getLogger(__name__)
_CHECK_EVERY_TICKS = 1000
_CLOSE_LINGER_MS = 200
_AFTER_BUG_S = 1.0
_STILL_S = 10.0
_LEAVE_GRACE_S = 30.0
"""How long a worker that a list names no more may go on with what it has."""
_TREES_S = 1.0
"""Longest wait for what workers tell of their trees: one that computes a long step answers behind it."""


class RouterEngine:
    """Implements request.client.Engine over worker links. Made, used and closed inside one running event loop."""

    def __init__(self, config: FrontConfig, links: Links) -> None:
        """Takes over `links` and dials the configured workers at once. Raises ConfigError as FrontCore does."""
        self._core = FrontCore(config)
        self._roster = Roster(config.workers)
        self._loop = asyncio.get_running_loop()
        self._links = AsyncLinks(links, self._on_envelope, self._on_broken)
        self._streams: dict[Room, Stream] = {}
        self._timer: asyncio.Handle | None = None
        self._due: float | None = None
        """When `_timer` ticks. The handle may not tell: uvloop's for a time that has passed does not."""
        self._num_ticks = 0
        self._ticked_at = monotonic()
        self._num_errors = 0
        self._used: dict[PeerName, bool] = {}
        """Worker |-> whether it took rooms when last looked at; absent: not since it started."""
        self._refusals: dict[PeerName, str | None] = {}
        """Every worker that was there when last looked at |-> why it is not used."""
        self._serving: list[str] = []
        """Revisions of the model of which there was a pair when last looked at, if there was any."""
        self._is_alone = False
        """Whether decode computed all prompts when last looked at."""
        self._halted: dict[PeerName, int] = {}
        """Worker |-> its process, which neither works nor ends."""
        self._trees_told = asyncio.Event()
        self._breach: str | None = None
        self.breached = asyncio.Event()
        """Set when two counts disagree: the process should drain and end."""
        self._is_closed = False
        self._perform(self._core.start(monotonic()))

    # ------------------------------------------------------------ the client's side

    async def generate(self, generation: Generation) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of one generation, as request.client.Engine says. A slow reader gets fewer, larger deltas."""
        actions = self._core.submit(generation, monotonic())
        stream = self._streams[generation.room] = Stream()
        try:
            self._perform(actions)
            while True:
                delta = await stream.take()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            del self._streams[generation.room]
            self._perform(self._core.cancel(generation.room, FailReason.CANCELLED, monotonic()))

    def finish(self, room: Room, output_len: int) -> None:
        """End a room early, as request.client.Engine says. Raises ValueError when more is to be kept than was
        delivered."""
        self._perform(self._core.finish(room, output_len))

    def cancel(self, room: Room, reason: FailReason) -> None:
        """End a room from outside; its client gets RequestFailed with the reason. Nothing when it is over."""
        self._perform(self._core.cancel(room, reason, monotonic()))

    def flush_cache(self) -> dict[str, int]:
        """Empty the workers' trees, as request.client.Engine says."""
        self._handle(FlushAsked())
        ready = [worker for worker in self._core.workers if worker.is_ready]
        return {w.name: sum(w.status.evictable_pages) if w.status else 0 for w in ready}

    async def trees(self) -> tuple[WorkerTree, ...]:
        """Ask the workers what their trees hold, as request.client.Engine says."""
        self._trees_told.clear()
        self._perform(self._core.ask_trees(monotonic()))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._trees_told.wait(), _TREES_S)
        return self._core.trees(monotonic())

    def change_role(self, worker: str, role: Role, grace_s: float) -> RoleAnswer:
        """Change a worker's role, as request.client.Engine says."""
        answer, actions = self._core.change_role(PeerName(worker), role, grace_s)
        self._perform(actions)
        return answer

    def add_worker(self, worker: str, role: Role, url: str) -> None:
        """Let a worker join, as request.client.Engine says."""
        member = Member(PeerName(worker), role, url)
        known = self._core.workers.get(member.name)
        if known is not None and known.is_ready and known.member.url != url:
            raise NameTaken(
                f"{worker} is in use, at {known.member.url}: have it leave first (/admin/workers/leave), or give the "
                f"new one another name (--worker-name)"
            )
        self._change_workers(Changes(joins=(member,)))
        self._roster.join(member)

    def remove_worker(self, worker: str, grace_s: float) -> None:
        """Let a worker leave, as request.client.Engine says."""
        name = PeerName(worker)
        self._core.known(name)
        self._change_workers(self._roster.send_away(name), grace_s)

    def workers_named(self, source: str, entries: Sequence[WorkerEntry]) -> None:
        """A list of workers is read, or has changed. What contradicts what is known is logged, and left out."""
        changes = self._roster.update(source, map(_member, entries))
        for member in changes.joins:
            try:
                self._change_workers(Changes(joins=(member,)))
            except RoleRefused as error:
                _log.warning("%s: %s", source, error)
        self._change_workers(Changes(leaves=changes.leaves))

    def _change_workers(self, changes: Changes, grace_s: float | None = None) -> None:
        """Raises RoleRefused."""
        for member in changes.joins:
            try:
                self._handle(WorkerUp(member))
            except ValueError as error:
                raise RoleRefused(str(error)) from error
            _log.info("%s joins, at %s", member.name, member.url)
        for name in changes.leaves:
            _log.info("%s is to leave: it gets no new requests", name)
            self._handle(WorkerLeaves(name, _LEAVE_GRACE_S if grace_s is None else grace_s))

    def limits(self) -> Limits | None:
        return self._core.limits(monotonic())

    def alive(self) -> str | None:
        """Why the front counts as dead; None: its timer runs at least with every heartbeat."""
        still_s = monotonic() - self._ticked_at
        return None if still_s < _STILL_S else f"the front's control plane made no tick for {still_s:.0f} s"

    def ready(self) -> str | None:
        reason = self._breach or self._core.ready() or self._core.doubt(monotonic())
        complaints = (f"{name}: {complaint}" for name, complaint in self._links.links.complaints.items())
        return reason if reason is None else "; ".join([reason, *self._halts(), *complaints])

    def refusal(self) -> str | None:
        return self._breach or self._core.refusal(monotonic())

    def stats(self) -> EngineStats:
        stats, complaints = self._core.stats(), self._links.links.complaints
        return replace(
            stats,
            workers=tuple(replace(w, link_complaint=complaints.get(PeerName(w.name))) for w in stats.workers),
            links=self._links.links.stats.as_metrics(),
            internal_errors=self._num_errors,
            integrity=self._breach,
            stopped_processes=dict(self._halted),
        )

    def _halts(self) -> Iterator[str]:
        for name, pid in self._halted.items():
            yield f"{name}: its process {pid} is stopped, by a signal or a debugger"

    # ------------------------------------------------------------ the supervisor's side

    def worker_up(self, worker: Member) -> None:
        """A worker listens: known by whoever started it. Raises ValueError when it had another role."""
        self._handle(WorkerUp(worker))

    def peer_died(self, worker: PeerName) -> None:
        """A worker's process ended: known by whoever reaped it, who also tells the user."""
        self._used.pop(worker, None)
        self._halted.pop(worker, None)
        self._handle(PeerDied(worker))

    def peer_halted(self, worker: PeerName, pid: int | None) -> None:
        """A worker's process is stopped, or goes on (None): known by whoever started it."""
        if pid is None:
            self._halted.pop(worker, None)
        else:
            self._halted[worker] = pid

    def drain(self) -> None:
        """Refuse new generations; those on their way end as they would."""
        self._core.drain()

    def is_drained(self) -> bool:
        return self._core.is_drained()

    def close(self) -> None:
        """End every generation (DRAINING), tell the workers, close the links. Idempotent."""
        if self._is_closed:
            return
        self._core.drain()
        for room in list(self._streams):
            self._perform(self._core.cancel(room, FailReason.DRAINING, monotonic()))
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._links.close(_CLOSE_LINGER_MS)

    # ------------------------------------------------------------ driving

    def _on_envelope(self, envelope: Envelope) -> None:
        self._try(FrameIn(envelope), f"{type(envelope.body).__name__} from {envelope.src[:80]}")

    def _on_broken(self, peer: PeerName) -> None:
        self._try(LinkBroken(peer), f"the broken connection to {peer}")

    def _try(self, event: FrontEvent, what: str) -> None:
        """A bug met while handling one thing must not stop those behind it."""
        try:
            self._handle(event)
        except Exception:
            self._num_errors += 1
            _log.exception("bug: while handling %s", what)

    def _handle(self, event: FrontEvent) -> None:
        self._perform(self._core.handle(event, monotonic()))

    def _tick(self) -> None:
        """A bug met here must not stop time."""
        self._timer = None
        self._num_ticks += 1
        self._ticked_at = monotonic()
        try:
            self._perform(self._core.tick(monotonic()))
        except Exception:
            self._num_errors += 1
            _log.exception("bug: while handling a timer")
            self._timer, self._due = self._loop.call_later(_AFTER_BUG_S, self._tick), None
        self._tell_changes()
        if not self._streams or self._num_ticks % _CHECK_EVERY_TICKS == 0:
            self._check()

    def _tell_changes(self) -> None:
        """Log which worker gets no requests any more, and why, and when it gets them again."""
        self._tell_membership()
        self._tell_revisions()
        self._tell_alone()
        for worker in self._core.workers:
            was_used, is_used = self._used.get(worker.name), worker.takes_rooms
            if was_used and not is_used:
                is_asked_for = worker.asked is not None or worker.leaves_at is not None
                level = logging.INFO if is_asked_for else logging.WARNING
                _log.log(level, "no requests for now to %s", worker.describe())
            elif is_used and was_used is False:
                _log.info("requests go to %s again", worker.name)
            if is_used or was_used is not None:
                self._used[worker.name] = is_used

    def _tell_membership(self) -> None:
        """Log who has left, and who does not fit and why: others may serve without it, so that nobody asks."""
        lone = self._core.workers.lone()
        refusals = {worker.name: worker.refusal or lone.get(worker.name) for worker in self._core.workers}
        for name in self._refusals.keys() - refusals.keys():
            self._used.pop(name, None)
            _log.info("%s has left", name)
        for name, refusal in refusals.items():
            if refusal is not None and refusal != self._refusals.get(name):
                _log.warning("%s is not used: %s", name, refusal)
        self._refusals = refusals

    def _tell_revisions(self) -> None:
        """Log when revisions of the model begin or end to serve beside each other."""
        serving = [str(pool.revision) for pool in self._core.workers.pools() if pool.has_pair]
        if serving and set(serving) != set(self._serving):
            if len(serving) > 1:
                _log.info("%d revisions serve, each by itself: %s", len(serving), ", ".join(serving))
            elif self._serving:
                _log.info("revision %s alone serves now", serving[0])
            self._serving = serving

    def _tell_alone(self) -> None:
        """Log when decode begins and ends to compute all prompts, as no prefill worker is there."""
        is_alone = self._core.workers.lacks_prefill()
        if is_alone and not self._is_alone:
            _log.warning("no prefill worker takes requests: decode computes their prompts until one does")
        elif self._is_alone and not is_alone:
            _log.info("prefill computes prompts again")
        self._is_alone = is_alone

    def _check(self) -> None:
        """A breach of accounting is reported and ends service in order; it fails no request."""
        try:
            self._core.check_integrity()
        except IntegrityError as error:
            if self._breach is None:
                _log.error("accounting is wrong, draining: %s", error)
            self._breach = f"accounting is wrong: {error}"
            self.breached.set()
            self._core.drain()

    def _perform(self, actions: Iterable[FrontAction]) -> None:
        if self._is_closed:
            return
        for action in actions:
            match action:
                case SendFrame(peer, envelope):
                    self._send(peer, envelope)
                case Dial(address):
                    self._links.dial(address)
                case HangUp(peer):
                    self._links.hang_up(peer)
                case Deliver(room, delta):
                    if room in self._streams:
                        self._streams[room].put(delta)
                case Fail(room, error):
                    if room in self._streams:
                        self._streams[room].fail(error)
                case TreesTold():
                    self._trees_told.set()
                case _:
                    assert_never(action)
        self._set_timer()

    def _send(self, peer: PeerName, envelope: Envelope) -> None:
        """A first Submit that could not leave ends its room now. The loss of others is noticed by repeats."""
        if self._links.send(peer, envelope) or not isinstance(envelope.body, Submit) or envelope.body.epoch > 1:
            return
        self._perform(self._core.cancel(Room(envelope.body.room), FailReason.OVERLOADED, monotonic()))

    def _set_timer(self) -> None:
        when = self._core.next_timer()
        if self._timer is not None:
            if self._due == when:
                return
            self._timer.cancel()
        self._timer, self._due = self._loop.call_at(when, self._tick), when


def _member(entry: WorkerEntry) -> Member:
    return Member(PeerName(entry.name), entry.role, entry.url)
