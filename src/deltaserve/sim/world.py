"""A cluster in one process: production front, instances, endpoints and transport objects, in virtual time.

Everything that happens is an event (time, number, call) in one heap; equal seeds give equal runs. What a link or the
fabric does to a frame or a write is decided by policies handed in, so a fault is data (safety: fault model).
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from deltaserve.control.peer.link import FrameIn, LinkBroken, PeerDied
from deltaserve.core.errors import ProtocolError
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.codec import decode, encode
from deltaserve.core.wire.messages import Envelope
from deltaserve.sim.faults import LinkFaults
from deltaserve.sim.loopback import Fabric
from deltaserve.sim.process import SimFront, SimProcess, SimWorker
from deltaserve.sim.sim_rank import SimRank
from deltaserve.sim.situations import Sightings, Situation
from deltaserve.sim.trace import Trace, describe

_Connection = tuple[PeerName, PeerName]
_Lives = tuple[PeerName, PeerName, int, int]
"""(from, to, life of either side): each life dials anew."""


class World:
    """Virtual time, links, and the processes on them."""

    def __init__(self, links: LinkFaults, fabric: Fabric, trace: Trace) -> None:
        self.now = 0.0
        self._links = links
        self.fabric = fabric
        self.trace = trace
        self.workers: dict[PeerName, SimWorker] = {}
        self.fronts: dict[PeerName, SimFront] = {}
        self.num_events = 0
        self.on_event: Callable[[int], None] | None = None
        """Called before each event with its number."""
        self.on_touch: Callable[[SimProcess], None] | None = None
        """Called when a process has dealt with something."""
        self.on_send: Callable[[PeerName, PeerName], None] = lambda src, dst: None
        """Called with the ends of each frame."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.seen = Sightings()
        self.turns: Counter[int] = Counter()
        """Events that a turn of a worker dealt with |-> such turns."""
        self._lives: Counter[PeerName] = Counter()
        self._in_order: dict[_Lives, float] = {}
        self._lives_on_their_way: defaultdict[_Connection, Counter[int]] = defaultdict(Counter)
        self._heard: dict[_Connection, tuple[int, int]] = {}
        """(life of who hears, latest life that it has heard)."""
        self._resets: dict[_Connection, int] = {}
        self._on_their_way: dict[int, tuple[PeerName, PeerName, bytes]] = {}
        """Number of a frame on its way |-> (from, to, a part of it)."""

    # ------------------------------------------------------------ time

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> int:
        """Let events happen until virtual time `until`, or until `done()`. Returns their number."""
        first = self.num_events
        while not done():
            due = self._events[0][0] if self._events else None
            landing = self.fabric.next_due()
            if landing is not None and landing <= until and (due is None or landing <= due):
                self._begin(landing)
            elif due is not None and due <= until:
                self._begin(due)
                heapq.heappop(self._events)[2]()
            else:
                break
        return self.num_events - first

    def _begin(self, when: float) -> None:
        self.now = max(self.now, when)
        self.num_events += 1
        if self.on_event is not None:
            self.on_event(self.num_events)
        self.fabric.advance(self.now)

    def touched(self, process: SimProcess) -> None:
        if self.on_touch is not None:
            self.on_touch(process)

    # ------------------------------------------------------------ links

    def send(self, src: PeerName, dst: PeerName, envelope: Envelope) -> None:
        """Through the real codec, with whatever the link does to it. Lost when the peer is not where it was dialled."""
        self.on_send(src, dst)
        if not self.reaches(src, dst):
            return
        for copy in self._links.copies(src, dst, encode(envelope), self.now):
            self.carry(src, dst, copy.frame, copy.delay)

    def reaches(self, src: PeerName, dst: PeerName) -> bool:
        """Whether a connection that was dialled leads to the process of that name."""
        sender, peer = self.process(src), self.workers.get(dst)
        url = None if sender is None else sender.dialled.get(dst)
        return url is None or peer is None or peer.url == url

    def carry(self, src: PeerName, dst: PeerName, frame: bytes, delay: float) -> None:
        """A copy of a frame arrives after `delay`, and after those sent before it between the same lives; lost when the
        connection breaks."""
        connection, life = (src, dst), self._lives[src]
        lives = (src, dst, life, self._lives[dst])
        when = self._in_order[lives] = max(self.now + delay, self._in_order.get(lives, 0.0))
        resets = self._resets.get(connection, 0)
        number = next(self._numbers)
        self._on_their_way[number] = src, dst, frame[3:7]
        under_way = self._lives_on_their_way[connection]
        under_way[life] += 1
        self.seen.note(Situation.THREE_LIVES, len(under_way) > 2)

        def arrive() -> None:
            del self._on_their_way[number]
            under_way[life] -= 1
            if not under_way[life]:
                del under_way[life]
            if self._resets.get(connection, 0) == resets:
                self._note_life(connection, life)
                self._arrive(src, dst, frame)

        self.at(when, arrive)

    def _note_life(self, connection: _Connection, life: int) -> None:
        _, dst = connection
        own, latest = self._heard.get(connection, (0, 0))
        latest = latest if own == self._lives[dst] else 0
        self.seen.note(Situation.LATE_LIFE, life < latest)
        self._heard[connection] = self._lives[dst], max(life, latest)

    def frames_on_their_way(self) -> list[tuple[PeerName, PeerName, bytes]]:
        """(from, to, checksum) of each."""
        return sorted(self._on_their_way.values())

    def last_arrival(self) -> float:
        """When everything that is on its way now has arrived."""
        return max(self._in_order.values(), default=self.now)

    def reset(self, one: PeerName, other: PeerName) -> None:
        """The connection breaks: what is on its way is lost, in both directions."""
        for connection in ((one, other), (other, one)):
            self._resets[connection] = self._resets.get(connection, 0) + 1
            for lives in [lives for lives in self._in_order if lives[:2] == connection]:
                del self._in_order[lives]
            self._tell_break(*connection)

    def _tell_break(self, dialler: PeerName, dialled: PeerName) -> None:
        process = self.process(dialler)
        if process is not None and dialled in process.dialled:
            self.at(self.now, lambda: process.receive(LinkBroken(dialled)))

    def _arrive(self, src: PeerName, dst: PeerName, frame: bytes) -> None:
        process = self.process(dst)
        if process is None:
            return
        try:
            envelope = decode(frame)
        except ProtocolError:
            self.trace.note(self.now, src, ">", dst, "refused frame")
            self.reset(src, dst)
            return
        self.trace.note(self.now, src, ">", dst, describe(envelope), frame[3:7].hex())
        process.receive(FrameIn(envelope))

    # ------------------------------------------------------------ processes

    def admit(self, process: SimProcess) -> None:
        """A process has started: it is the one of its name."""
        self._lives[process.name] += 1
        self._links.begin_life(process.name)
        if isinstance(process, SimFront):
            self.fronts[process.name] = process
        elif isinstance(process, SimWorker):
            self.workers[process.name] = process

    def process(self, name: PeerName) -> SimProcess | None:
        """The live process of that name."""
        front = self.fronts.get(name)
        if front is not None:
            return front if front.is_alive else None
        return self.workers.get(name)

    def kill(self, name: PeerName, still_lands_s: float = 0.0) -> None:
        """The process is gone; whoever watches it tells the others."""
        self.end(name, still_lands_s)
        self.tell_death(name)

    def end(self, name: PeerName, still_lands_s: float = 0.0, ranks_end_s: Sequence[float] = ()) -> None:
        """The process is gone, unseen. What it had written `still_lands_s` before the wire's end still arrives.

        `ranks_end_s`: how long the ranks behind the first, each a process, go on moving bytes.
        """
        process = self.process(name)
        if process is None:
            return
        self.trace.note(self.now, name, "ends")
        process.is_alive = False
        for other in (*self.workers, *self.fronts):
            self._tell_break(other, name)
        if isinstance(process, SimWorker):
            del self.workers[name]
            delays = itertools.chain((0.0, *ranks_end_s), itertools.repeat(0.0))
            for rank, after_s in zip(process.ranks, delays, strict=False):
                self._end_rank_later(rank, still_lands_s, after_s)

    def _end_rank_later(self, rank: SimRank, still_lands_s: float, after_s: float) -> None:
        if after_s:
            self.at(self.now + after_s, lambda: self.end_rank(rank, still_lands_s))
        else:
            self.end_rank(rank, still_lands_s)

    def end_rank(self, rank: SimRank, still_lands_s: float) -> None:
        """The process of one rank is gone."""
        if not rank.is_gone:
            rank.is_gone = True
            self.fabric.sever(rank.transport, still_lands_s)

    def tell_death(self, name: PeerName) -> None:
        """Everybody who is there learns that a process of that name has ended."""
        for process in (*self.workers.values(), *self.fronts.values()):
            if process.is_alive:
                process.receive(PeerDied(name))


def boot_of(name: str, life: int) -> Boot:
    """A boot id that no other life of any process has; the next few are those of its changes of role."""
    return Boot(int.from_bytes(name.encode(), "little") % 0xFFFF_FFFF_FFC5 * 1000 + 10 * life)
