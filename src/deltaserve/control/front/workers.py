"""The registry: which workers there are, whether they are there, fit together, and how loaded they are.

A worker is dialled as soon as it is known where it listens, and sent a Hello until it answers. Its answer is checked
against those in use, in configuration order: all have equal `compat` maps, and pages can move between each prefill and
each decode worker (control/peer/page_fit.py). Who differs is refused, with both values named, until the other or the
worker itself is gone.

Rooms are taken while there is a pair, and also while the pair is complete with workers that are expected back:

    was in use once, its process ended (whoever starts it says so)     expected until it is there
    was in use, cannot be reached                                      expected for `come_back_s`
    ready, changing its role                                           expected, in its new role
    never in use; refused; draining or unwell when last heard of       not expected
    leaves                                                             not expected
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deltaserve.control.front.client import RoleAnswer, RoleRefused
from deltaserve.control.front.events import FrontConfig, Member
from deltaserve.control.front.load import LoadReport, Unseen
from deltaserve.control.front.wellness import Wellness
from deltaserve.control.peer.handshake import Handshake, Received, Reception
from deltaserve.control.peer.link import Dial, HangUp, LinkAction, SendFrame
from deltaserve.control.peer.page_fit import CHANGEABLE, misfit
from deltaserve.control.peer.table import Patience, Peer, PeerEvent, PeerState, PeerTable
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.keys import seed_check
from deltaserve.core.wire.messages import (
    ChangeRole,
    Envelope,
    Facts,
    Flush,
    Heartbeat,
    Hello,
    Message,
    PeerAddress,
    Status,
)

STATE_WORDS = {
    PeerState.UNKNOWN: "not connected",
    PeerState.GREETING: "starting or unreachable",
    PeerState.READY: "ready",
    PeerState.REFUSED: "refused",
    PeerState.LOST: "lost",
}
"""A worker's link, as users are told of it."""
MOST_WORKERS = 256
"""Workers of one front: each decode worker is told of all prefill workers, whenever one joins."""


@dataclass(slots=True)
class Worker:
    """One configured worker, and what this front put there."""

    member: Member
    peer: Peer
    refusal: str | None = None
    """Why it is not used, both values named."""
    status: Status | None = None
    status_at: float = 0.0
    wellness: Wellness = field(default_factory=Wellness)
    complaint: str | None = None
    """What its last report says is wrong with it."""
    unseen: Unseen = field(default_factory=Unseen)
    """Load placed there since `status_at`."""
    own_tokens: int = 0
    """Tokens to compute of rooms placed here that have no first token."""
    own_rooms: int = 0
    """Rooms placed here; on prefill only until their first token."""
    own_output_tokens: int = 0
    """What rooms placed here for decoding are expected to produce."""
    away_since: float | None = None
    """When the worker, in the same life, began to take us for lost: it may still have our rooms. None: it does not."""
    expected_until: float | None = None
    """Time until which it is expected back, should it not be there. None: not at all."""
    last_facts: Facts | None = None
    """Facts of the life in which it was in use last; None: it never was."""
    next_hello: float = 0.0
    hello_pause_s: float = 0.0
    role: Role = field(init=False)
    """Configured role, until its Hello says that it was changed since."""
    asked: ChangeRole | None = None
    """What it is to become: repeated until it has."""
    leaves_at: float | None = None
    """It is to leave: when its rooms are moved elsewhere. None: it stays."""

    def __post_init__(self) -> None:
        self.role = self.member.role

    @property
    def name(self) -> PeerName:
        return self.peer.name

    @property
    def is_found(self) -> bool:
        """Whether it is known where it listens."""
        return self.member.url is not None

    @property
    def is_ready(self) -> bool:
        return self.peer.is_ready

    @property
    def takes_rooms(self) -> bool:
        """Ready, and not about to leave."""
        is_staying = self.status is None or (self.status.ready and not self.status.draining)
        is_free = self.complaint is None and self.asked is None and self.leaves_at is None
        return self.is_ready and is_staying and is_free

    def is_expected(self, now: float) -> bool:
        """Whether it takes no rooms now, and will soon."""
        if self.peer.state is PeerState.REFUSED or self.leaves_at is not None:
            return False
        if self.is_ready:
            return self.asked is not None
        return self.expected_until is not None and now < self.expected_until

    @property
    def next_role(self) -> Role:
        """What it is, or is about to be."""
        return self.role if self.asked is None else self.asked.role

    @property
    def facts(self) -> Facts:
        """Facts of its present life, or of the former one while a new one has not told; empty before its first
        Hello."""
        return self.peer.hello.facts if self.peer.hello else self.last_facts or Facts()

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool that keeps every page, the first; 0 while the worker tells of none."""
        return next(iter(self.facts.pool_pages), 0) * self.facts.page_size

    def report(self, now: float) -> LoadReport:
        return LoadReport(
            worker=self.name,
            status=self.status,
            age_s=now - self.status_at,
            pool_tokens=self.pool_tokens,
            max_running=self.facts.max_running,
            own_tokens=self.own_tokens,
            own_rooms=self.own_rooms,
            own_output_tokens=self.own_output_tokens,
            unseen=self.unseen,
            group=self.member.group,
        )

    def describe(self) -> str:
        """One clause for `ready()`: why this worker takes no rooms."""
        if self.leaves_at is not None:
            return f"{self.name}: leaving"
        if self.refusal is not None:
            return f"{self.name}: {self.refusal}"
        if not self.is_found:
            return f"{self.name}: not started yet"
        if not self.is_ready:
            return f"{self.name}: {STATE_WORDS[self.peer.state]}"
        if self.asked is not None:
            return f"{self.name}: changing from {self.role.value} to {self.asked.role.value}"
        return f"{self.name}: {self.complaint or ('draining' if self.status and self.status.draining else 'not ready')}"


@dataclass(frozen=True, slots=True)
class FromWorker:
    """What a frame turned out to be."""

    worker: Worker
    message: Message | None
    """Message for the front to handle; None when the frame was about the link itself, or not current."""
    is_gone: bool = False
    """The worker's former life is over: everything placed there must fail first."""
    is_back: bool = False
    """The connection stands again after it was interrupted: frames of both sides may be lost."""


class Workers:
    """All workers of one front. What is to be done on links goes to `emit`, in order."""

    def __init__(self, config: FrontConfig, emit: Callable[[LinkAction], None]) -> None:
        self._config = config
        self._emit = emit
        self.table = PeerTable(config.name, config.boot, Patience(config.peer_lost_s, config.peer_suspect_s))
        self._handshake = Handshake(self.table)
        self._workers: dict[PeerName, Worker] = {}
        for member in config.workers:
            self._workers[member.name] = Worker(member, self.table.get(member.name))
        self._seed_check = seed_check(config.cluster_secret, config.fingerprint)
        self._next_beat = 0.0

    @property
    def num_stale_frames(self) -> int:
        return self._handshake.num_ignored

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, name: PeerName) -> Worker | None:
        return self._workers.get(name)

    def of(self, role: Role) -> list[Worker]:
        """Workers of a role that take rooms now, in configuration order. None of a group of which one is missing: it
        cannot compute, and all of it are about to end."""
        maimed = {w.member.group for w in self._workers.values() if not w.is_ready} - {None}
        return [w for w in self._workers.values() if w.role is role and w.takes_rooms and w.member.group not in maimed]

    def address(self, name: PeerName) -> PeerAddress:
        return self._workers[name].member.address

    @property
    def alone_role(self) -> Role:
        """Role of workers that serve a room without another one."""
        return self._config.half or Role.UNIFIED

    def shortage(self) -> str | None:
        """Why no room can be taken: every worker that takes none, and why. None when there is a pair."""
        half = self._config.half
        if self.of(self.alone_role) or (half is None and self.of(Role.PREFILL) and self.of(Role.DECODE)):
            return None
        roles = {worker.role for worker in self}
        needed = (Role.PREFILL, Role.DECODE) if half is None else (half,)
        missing = [role.value for role in needed if not {role, Role.UNIFIED} & roles]
        absent = [f"no {' and no '.join(missing)} worker is known"] if missing else []
        return "; ".join([*(w.describe() for w in self if not w.takes_rooms), *absent])

    def takers(self, now: float) -> list[Worker]:
        """Workers that take rooms now, or will soon."""
        return [w for w in self._workers.values() if w.takes_rooms or w.is_expected(now)]

    def refusal(self, now: float) -> str | None:
        """Why a new room is not even held until a worker is back. None: it is taken."""
        roles = {w.next_role for w in self.takers(now)}
        is_pair = self._config.half is None and {Role.PREFILL, Role.DECODE} <= roles
        return None if self.alone_role in roles or is_pair else self.shortage()

    def meet(self, prefill: PeerAddress, now: float) -> None:
        """A request names this prefill worker: it is dialled, unless it is known. Raises ValueError as `register`
        does."""
        known = self.get(PeerName(prefill.name))
        has_moved = known is not None and known.member.url != prefill.url and not known.is_ready
        if known is None or known.leaves_at is not None or has_moved:
            self.register(Member(PeerName(prefill.name), Role.PREFILL, prefill.url), now)

    # ------------------------------------------------------------ sending

    def send(self, worker: Worker, message: Message) -> None:
        self._emit(SendFrame(worker.name, self.table.seal(worker.name, message)))

    def start(self, now: float) -> None:
        """Dial and send Hello to everyone whose address is known."""
        for worker in self._workers.values():
            self._dial(worker)
            self._greet(worker, now)
        self._next_beat = now + self._config.heartbeat_s

    def register(self, member: Member, now: float) -> None:
        """A worker is known to listen there now. Raises ValueError when it had another role, nobody says
        where, or there are too many."""
        name, address = member.name, member.address
        worker = self._workers.get(name)
        if worker is None and len(self._workers) >= MOST_WORKERS:
            raise ValueError(f"{name} is one too many: a front knows at most {MOST_WORKERS} workers")
        if worker is None:
            worker = self._workers[name] = Worker(member, self.table.get(name))
        if worker.member.role is not member.role:
            raise ValueError(f"{name} is a {worker.member.role.value} worker, not {member.role.value}")
        worker.leaves_at = None
        if worker.member == member and worker.peer.state in _THERE:
            return
        worker.member = member
        self._emit(Dial(address))
        if worker.peer.state not in _THERE:
            self._reset(worker)
            self._greet(worker, now)
        if member.role is Role.PREFILL:
            self._tell_decodes()

    def leave(self, worker: Worker, grace_s: float, now: float) -> None:
        """It takes no rooms any more. Said again, the sooner end of its grace counts."""
        leaves_at = now + grace_s
        worker.leaves_at = leaves_at if worker.leaves_at is None else min(worker.leaves_at, leaves_at)

    def leaving(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.leaves_at is not None]

    def forget(self, worker: Worker) -> None:
        """It has left: no frame of it is heard any more. Precondition: no room is on it."""
        del self._workers[worker.name]
        self.table.forget(worker.name)
        self._emit(HangUp(worker.name))
        if worker.role is Role.PREFILL:
            self._tell_decodes()
        self._reconsider()

    def _tell_decodes(self) -> None:
        """Where the prefill workers are."""
        for decode in self._workers.values():
            if decode.role is Role.DECODE and decode.is_found:  # also one whose answer is on its way
                self._send_hello(decode)

    def change_role(self, worker: Worker, asked: ChangeRole) -> RoleAnswer:
        """Have it drain and take up another role. Raises RoleRefused."""
        if worker.role is asked.role and worker.asked is None:
            return RoleAnswer.HELD
        problem = self._keeps_role(worker, asked.role)
        if problem is not None:
            raise RoleRefused(problem)
        worker.asked = asked
        self.send(worker, asked)
        return RoleAnswer.CHANGING

    def _keeps_role(self, worker: Worker, role: Role) -> str | None:
        """Why its role cannot be changed now."""
        if {worker.role, role}.difference(CHANGEABLE):
            return f"{worker.name} is a {worker.role.value} worker: only prefill and decode change into each other"
        if worker.member.group is not None:
            return f"{worker.name} shares experts with other {worker.role.value} workers: they all keep their role"
        if worker.asked is not None:
            return None
        if not worker.takes_rooms:
            return f"{worker.describe()}; a worker changes its role while it takes requests"
        others = [w.name for w in self.of(worker.role) if w is not worker and w.status is not None]
        if not others:
            kind = worker.role.value
            return f"{worker.name} is the only {kind} worker that takes requests: make another one {kind} first"
        return None

    def flush(self) -> None:
        """Everyone who is there drops what no lease protects."""
        for worker in self._workers.values():
            if worker.is_ready:
                self.send(worker, Flush())

    def ask_snapshot(self, worker: Worker, now: float) -> None:
        """Ask for a snapshot by a Hello, which the worker answers with one; at a bounded rate."""
        if now >= worker.next_hello:
            worker.next_hello = now + self._config.echo_s
            self._send_hello(worker)

    def _dial(self, worker: Worker) -> None:
        if worker.is_found:
            self._emit(Dial(worker.member.address))

    def _greet(self, worker: Worker, now: float) -> None:
        if not worker.is_found:
            return
        self.table.move(worker.peer, PeerEvent.GREET)
        pause_s = worker.hello_pause_s or self._config.heartbeat_s
        worker.next_hello = now + pause_s
        worker.hello_pause_s = min(2 * pause_s, self._config.hello_back_off_s)
        self._send_hello(worker)

    def _send_hello(self, worker: Worker) -> None:
        prefills = tuple(w.member.address for w in self._workers.values() if w.role is Role.PREFILL and w.is_found)
        hello = Hello(
            role=Role.FRONT.value,
            compat={},
            facts=Facts(keys_seed_check=self._seed_check),
            peers=prefills if worker.role is Role.DECODE else (),
        )
        # To whatever boot is there: a restarted worker must not refuse it as meant for its former life.
        envelope = Envelope(src=self._config.name, src_boot=self._config.boot, dst_boot=None, body=hello)
        self._emit(SendFrame(worker.name, envelope))

    # ------------------------------------------------------------ receiving

    def receive(self, envelope: Envelope, now: float) -> FromWorker | None:
        """Judge a frame by its boots and deal with Hellos. None: nobody we know, or not where."""
        worker = self._workers.get(PeerName(envelope.src))
        if worker is None or not worker.is_found:
            self._handshake.ignore()
            return None
        received = self._handshake.receive(envelope, now)
        if received.is_new:
            self._reset(worker)
        match received.reception, envelope.body:
            case Reception.HELLO, Hello() as hello:
                return self._on_hello(worker, hello, received, now)
            case Reception.MISADDRESSED, _:
                self.ask_snapshot(worker, now)  # a Hello tells it who we are
            case ((Reception.UNGREETED | Reception.BOTH_UNREADY), _):
                if worker.peer.state is not PeerState.REFUSED and now >= worker.next_hello:
                    self._greet(worker, now)
            case Reception.LEFT, _:
                self._reset(worker)
                worker.away_since = now
                self._greet(worker, now)
            case Reception.CURRENT, body:
                self._expect(worker, now)
                return FromWorker(worker, body, received.is_gone, is_back=received.was_broken)
        return FromWorker(worker, None, received.is_gone)

    def _on_hello(self, worker: Worker, hello: Hello, received: Received, now: float) -> FromWorker:
        was_away, worker.away_since = worker.away_since is not None, None
        worker.peer.hello = hello
        worker.hello_pause_s = 0.0
        self._judge(worker, hello)
        self._reconsider()
        self._expect(worker, now)
        is_back = worker.is_ready and (was_away or received.was_broken)
        return FromWorker(worker, None, received.is_gone or not worker.is_ready, is_back)

    def _learn_role(self, worker: Worker, hello: Hello) -> None:
        """One that was started anew, as what it is configured, goes back to the role it had: it may be the last."""
        role, was_changed = Role(hello.role), bool(hello.configured_role)
        if worker.asked is not None and worker.asked.role is role:
            worker.asked = None
        elif worker.asked is None and role is not worker.role and not was_changed:
            worker.asked = ChangeRole(role=worker.role, grace_ms=0)
        if role is not worker.role:
            worker.role = role
            if role is Role.PREFILL:
                self._tell_decodes()
            else:
                self._send_hello(worker)  # it connects to the prefill workers before the first request for them

    def _expect(self, worker: Worker, now: float) -> None:
        """Expect the worker back, since it is in use now."""
        if worker.takes_rooms:
            worker.expected_until, worker.last_facts = now + self._config.come_back_s, worker.facts

    def _judge(self, worker: Worker, hello: Hello) -> None:
        """Take the worker as what its Hello says, or refuse it."""
        others = {w.name: w.peer.hello for w in self if w is not worker and w.is_ready and w.peer.hello is not None}
        worker.refusal = misfit(hello, worker.member.role, self._seed_check, others)
        self.table.move(worker.peer, PeerEvent.HELLO if worker.refusal is None else PeerEvent.REFUSE)
        if worker.is_ready:
            self._learn_role(worker, hello)

    def _reconsider(self) -> None:
        """Judge the refused workers again: the one they were compared with may be gone."""
        for worker in self._workers.values():
            if worker.peer.state is PeerState.REFUSED and worker.peer.hello is not None:
                self._judge(worker, worker.peer.hello)

    def on_status(self, worker: Worker, status: Status, now: float) -> None:
        """A report that no worker could mean is not used: prices made of it would fail every request."""
        if _is_sound(status):
            worker.status, worker.status_at, worker.unseen = status, now, Unseen()
            worker.complaint = worker.wellness.hear(status, now)
            if worker.asked is None and not worker.takes_rooms:
                worker.expected_until = None

    # ------------------------------------------------------------ loss and time

    def died(self, worker: Worker, now: float) -> None:
        """Note that its process ended: frames of that boot count no more. Whoever says so starts it again."""
        self.table.bury(worker.peer)
        if worker.last_facts is not None:
            worker.expected_until = math.inf
        self.lose(worker, now)

    def lose(self, worker: Worker, now: float) -> None:
        """Take the worker for lost: a new link is made at once, and Hello is sent until it answers."""
        if worker.peer.state is not PeerState.UNKNOWN and worker.peer.state is not PeerState.LOST:
            self.table.move(worker.peer, PeerEvent.LOSE)
        self._reset(worker)
        self._emit(HangUp(worker.name))
        self._dial(worker)
        self._greet(worker, now)
        self._reconsider()

    def _reset(self, worker: Worker) -> None:
        worker.status, worker.refusal, worker.unseen = None, None, Unseen()
        worker.hello_pause_s, worker.next_hello, worker.away_since = 0.0, 0.0, None
        worker.wellness, worker.complaint = Wellness(), None

    def beat(self, now: float) -> list[Worker]:
        """When due: heartbeats to those who are there, Hellos to those who are not. Returns who fell silent."""
        self.table.discount_pause(max(0.0, now - self._next_beat), now)
        silent = [w for w in self._workers.values() if self._is_silent(w, now)]
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            for worker in self._workers.values():
                if worker.peer.state in _THERE:
                    self.send(worker, worker.asked or Heartbeat())
                elif now >= worker.next_hello:
                    self._greet(worker, now)
        return silent

    def _is_silent(self, worker: Worker, now: float) -> bool:
        if worker.away_since is not None:  # sent a Hello again, and it does not answer
            return now - worker.away_since >= self._config.peer_suspect_s
        return worker.peer.state in _THERE and now >= self.table.lost_at(worker.peer)

    def next_timer(self) -> float:
        return min(
            [self._next_beat, *(self.table.lost_at(w.peer) for w in self._workers.values() if w.peer.state in _THERE)]
        )


def _is_sound(status: Status) -> bool:
    counts = (status.num_waiting, status.waiting_tokens, status.num_running)
    pools = (*status.free_pages, *status.evictable_pages, *status.quarantined_pages, *status.num_pages)
    measured = (status.prefill_tokens_per_s, status.decode_step_s)
    is_bounded = all(0 <= value < _MAX_REPORTED for value in (*counts, *pools, *measured))  # false for NaN too
    return is_bounded and all(value == 0 or value >= _MIN_MEASURED for value in measured)


_MAX_REPORTED = 1 << 53
_MIN_MEASURED = 1e-9
"""Tokens per second, or seconds. Zero means not measured yet; a rate near it would price everything at infinity."""
_THERE = (PeerState.READY, PeerState.REFUSED)
