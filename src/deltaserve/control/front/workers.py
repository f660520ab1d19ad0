"""The registry: which workers there are, whether they are there, fit together, and how loaded they are.

A worker is dialled as soon as it is known where it listens, and sent a Hello until it answers. Its answer says which
revision it is of (control/peer/revision.py). Workers of one revision are a pool (pools.py): rooms are placed within
one, and decode workers are told of the prefill workers of theirs alone, once both have answered. Within a pool pages
must be able to move between each prefill and each decode worker (control/peer/page_fit.py): who does not fit those in
use is refused, with both values named, until the other or the worker itself is gone.

Rooms are taken while there is a pair, and also while a pair is complete with workers that are expected back:

    was in use once, its process ended (whoever starts it says so)     expected until it is there
    was in use, cannot be reached                                      expected for `come_back_s`
    ready, changing its role                                           expected, in its new role
    never in use; refused; draining or unwell when last heard of       not expected
    leaves                                                             not expected

Where decode may compute prompts itself (--conditional-prefill auto), its workers are enough while no prefill worker of
their revision takes rooms, if one has once: a server that never had a pair is not ready, for something is wrong with
it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltaserve.control.front.client import RoleAnswer, RoleRefused
from deltaserve.control.front.events import FrontConfig, Member
from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.load import Unseen
from deltaserve.control.front.pools import Pool, fellows_missing, pools_of
from deltaserve.control.front.wellness import Wellness
from deltaserve.control.peer.handshake import Handshake, Received, Reception
from deltaserve.control.peer.link import Dial, HangUp, LinkAction, SendFrame
from deltaserve.control.peer.page_fit import CHANGEABLE, FrontTerms, misfit
from deltaserve.control.peer.revision import Revision, revision_of
from deltaserve.control.peer.table import Patience, PeerEvent, PeerState, PeerTable
from deltaserve.core.ids import PeerName, Role
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

MOST_WORKERS = 256
"""Workers of one front: each decode worker is told of all prefill workers, whenever one joins."""


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
        self._terms = FrontTerms(config.cluster_secret, config.tokenizer)
        self._next_beat = 0.0
        self._had_prefill: set[Revision] = set()
        """Revisions of which a prefill worker took rooms."""

    @property
    def num_stale_frames(self) -> int:
        return self._handshake.num_ignored

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, name: PeerName) -> Worker | None:
        return self._workers.get(name)

    def pools(self) -> list[Pool]:
        """Workers that take rooms now, by revision, in configuration order. Decode workers without a prefill worker
        count as unified ones where they may go alone."""
        return self._completed(self._present())

    def pool(self, revision: Revision | None) -> Pool:
        """Workers of a revision that take rooms now, each in its role; without any where there are none."""
        return next((pool for pool in self._present() if pool.revision == revision), Pool(revision))

    def _present(self) -> list[Pool]:
        """Workers that take rooms now, each in its role. None of a group of which one is missing: it cannot compute,
        and all of it are about to end."""
        maimed = {w.group for w in self._workers.values() if not w.is_ready} - {None}
        return pools_of(w for w in self._workers.values() if w.takes_rooms and w.group not in maimed)

    def _completed(self, pools: list[Pool]) -> list[Pool]:
        """The pools, with decode workers alone where prefill workers are missing."""
        return [pool if pool.prefills or not self.may_go_alone(pool) else pool.alone() for pool in pools]

    def lacks_prefill(self) -> bool:
        """Whether decode workers of some revision compute all prompts, since no prefill worker of it takes rooms."""
        return any(not pool.prefills and self.may_go_alone(pool) for pool in self._present())

    def may_go_alone(self, pool: Pool) -> bool:
        """Whether decode workers of the pool may compute prompts that no prefill worker can."""
        return self._config.weighs_prompts and bool(pool.decodes) and pool.revision in self._had_prefill

    def address(self, name: PeerName) -> PeerAddress:
        return self._workers[name].member.address

    def fellow(self, decode: PeerName, prefill: PeerName | None) -> PeerAddress | None:
        """Where a prefill worker listens, if it is of the decode worker's revision: it may have been exchanged in its
        place since a room was placed on both."""
        if prefill is None or self._workers[prefill].revision != self._workers[decode].revision:
            return None
        return self.address(prefill)

    @property
    def alone_role(self) -> Role:
        """Role of workers that serve a room without another one."""
        return self._config.half or Role.UNIFIED

    def of(self, role: Role) -> list[Worker]:
        """Workers of a role that take rooms now, of all revisions."""
        return [worker for pool in self.pools() for worker in pool.of(role)]

    def is_enough(self, pool: Pool) -> bool:
        """Whether a room can be placed there: on a pair, or on the one worker that this front speaks for."""
        half = self._config.half
        return pool.has_pair if half is None else bool(pool.of(half))

    def shortage(self) -> str | None:
        """Why no room can be taken: every worker that takes none, and why. None when there is a pair."""
        half, pools = self._config.half, self.pools()
        if any(map(self.is_enough, pools)):
            return None
        roles = {worker.role for worker in self}
        needed = (Role.PREFILL, Role.DECODE) if half is None else (half,)
        missing = [role.value for role in needed if not {role, Role.UNIFIED} & roles]
        absent = [f"no {' and no '.join(missing)} worker is known"] if missing else []
        lone = (f"{name}: {words}" for name, words in fellows_missing(pools).items())
        return "; ".join([*(w.describe() for w in self if not w.takes_rooms), *lone, *absent])

    def lone(self) -> dict[PeerName, str]:
        """Workers that take rooms and get none, for want of another half of their revision |-> why."""
        return fellows_missing(self.pools())

    def problem_of(self, worker: Worker) -> str | None:
        """Why it gets no rooms; None: it does."""
        lone = self.lone().get(worker.name)
        return worker.describe() if not worker.takes_rooms else None if lone is None else f"{worker.name}: {lone}"

    def takers(self, now: float) -> list[Pool]:
        """Workers that take rooms now, or will soon, in the roles that they will have then."""
        takers = (w for w in self._workers.values() if w.takes_rooms or w.is_expected(now))
        return self._completed(pools_of(takers, lambda worker: worker.next_role))

    def refusal(self, now: float) -> str | None:
        """Why a new room is not even held until a worker is back. None: it is taken."""
        return None if any(map(self.is_enough, self.takers(now))) else self.shortage()

    def may_serve(self, revision: Revision, now: float) -> bool:
        """Whether there is a pair of this revision, be it unwell, or may be soon."""
        there = (w for w in self._workers.values() if w.leaves_at is None and (w.is_ready or w.is_expected(now)))
        pools = self._completed(pools_of(there, lambda w: w.next_role))
        return any(self.is_enough(pool) for pool in pools if pool.revision == revision)

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
        self._reconsider()
        self._tell_decodes()

    def _tell_decodes(self) -> None:
        """Decode workers hear where the prefill workers of their revision are, as far as they do not know."""
        for decode in self._workers.values():
            if decode.is_ready and decode.told != self._prefills_for(decode):
                self._send_hello(decode)

    def _prefills_for(self, decode: Worker) -> tuple[PeerAddress, ...]:
        """What it is to be told of: workers that answered once, for only they can be known to be of its revision."""
        if decode.role is not Role.DECODE or not decode.is_ready:
            return ()
        fellows = (w for w in self._workers.values() if w.revision == decode.revision and w.role is Role.PREFILL)
        return tuple(w.member.address for w in fellows if w.is_found and w.refusal is None)

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
        if worker.group is not None:
            return f"{worker.name} shares experts with other {worker.role.value} workers: they all keep their role"
        if worker.asked is not None:
            return None
        if not worker.takes_rooms:
            return f"{worker.describe()}; a worker changes its role while it takes requests"
        pool, kind = self.pool(worker.revision), worker.role.value
        others = [w.name for w in pool.of(worker.role) if w is not worker and w.status is not None]
        if not others:
            among = f" of revision {worker.revision}" if len(self.pools()) > 1 else ""
            only = f"{worker.name} is the only {kind} worker{among} that takes requests"
            return f"{only}: make another one {kind} first"
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
        worker.told = self._prefills_for(worker)
        hello = Hello(role=Role.FRONT.value, compat={}, facts=Facts(), peers=worker.told)
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
        was_away, worker.away_since, former = worker.away_since is not None, None, worker.revision
        worker.peer.hello = hello
        worker.hello_pause_s = 0.0
        self._judge(worker, hello)
        self._reconsider()
        self._tell_decodes()
        self._expect(worker, now)
        is_back = worker.is_ready and (was_away or received.was_broken)
        is_other = former is not None and former != worker.revision
        return FromWorker(worker, None, received.is_gone or is_other or not worker.is_ready, is_back and not is_other)

    def _learn_role(self, worker: Worker, hello: Hello) -> None:
        """One that was started anew, as what it is configured, goes back to the role it had: it may be the last."""
        role, was_changed = Role(hello.role), bool(hello.configured_role)
        if worker.asked is not None and worker.asked.role is role:
            worker.asked = None
        elif worker.asked is None and role is not worker.role and not was_changed:
            worker.asked = ChangeRole(role=worker.role, grace_ms=0)
        worker.role = role

    def _expect(self, worker: Worker, now: float) -> None:
        """Expect the worker back, since it is in use now."""
        if worker.takes_rooms:
            worker.expected_until, worker.last_facts = now + self._config.come_back_s, worker.facts
            if worker.role is Role.PREFILL and worker.revision is not None:
                self._had_prefill.add(worker.revision)

    def _judge(self, worker: Worker, hello: Hello) -> None:
        """Take the worker as what its Hello says, or refuse it."""
        worker.revision = revision_of(hello)
        fellows = (w for w in self if w is not worker and w.is_ready and w.revision == worker.revision)
        others = {w.name: w.peer.hello for w in fellows if w.peer.hello is not None}
        worker.refusal = misfit(hello, worker.member.role, self._terms, others)
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
            worker.take(status, now)
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
        worker.hello_pause_s, worker.next_hello, worker.away_since, worker.told = 0.0, 0.0, None, ()
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
