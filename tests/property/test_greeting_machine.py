"""Two workers shake hands over a link that loses, doubles and reorders frames, while either may start anew or fall
silent.

Nobody is READY with a process start it knows to be over; once the link is healthy both are READY, each with the other's
present start, and prefill with decode's present endpoint. What is told of a former endpoint counts for the present one
never: that one's tickets would end while its writes go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.engine.api import Action, InstanceConfig, InstanceOptions
from deltaserve.control.engine.parts import facts_of
from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.link import SendFrame
from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    FencePeer,
    OpenEndpoint,
    PeerFenced,
)
from deltaserve.control.transfer.receiver import Receiver
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Envelope, PeerAddress, RankEnd
from deltaserve.sim.oracle import stamp_spec

NAMES = (PeerName("prefill-0"), PeerName("decode-0"))
ROLES = {NAMES[0]: Role.PREFILL, NAMES[1]: Role.DECODE}
LOST_S, BEAT_S = 1.5, 0.5


def config_of(name: PeerName, boot: int) -> InstanceConfig:
    return InstanceConfig(
        name=name,
        role=ROLES[name],
        boot=boot,
        cache=stamp_spec(4, 1),
        num_pages=(8,),
        max_running_requests=2,
        max_context_len=32,
        vocab_size=97,
        compat=(("model", "m"),),
        cluster_secret=b"s" * 32,
        fingerprint="m",
        transport="loopback",
        options=InstanceOptions(),
    )


@dataclass
class Side:
    """One process: its links, its endpoint for the other, and reports that are not told yet."""

    name: PeerName
    other: PeerName
    boot: int
    links: PeerLinks = field(init=False)
    out: list[Action] = field(default_factory=list)
    reports: list[EndpointOpened | EndpointAttached | EndpointFailed | PeerFenced] = field(default_factory=list)
    num_endpoints: int = 0
    endpoint: bytes | None = None
    attached: bytes | None = None

    def __post_init__(self) -> None:
        config = config_of(self.name, self.boot)
        receiver = Receiver(Boot(self.boot), (), LOST_S)
        self.links = PeerLinks(config, facts_of(config), LOST_S, receiver)

    def turn(self, now: float) -> EngineTurn:
        """A call whose actions come behind those of the calls before."""
        return EngineTurn(now, False, self.out)

    def _has_no_end(self, command: Action) -> bool:
        """An attach for an endpoint that was fenced meanwhile."""
        return isinstance(command, AttachEndpoint) and self.endpoint is None

    def work(self, fails: bool) -> list[Envelope]:
        """Perform what the links asked for; the frames that leave."""
        frames = []
        while self.out:
            match self.out.pop(0):
                case SendFrame(_, envelope):
                    frames.append(envelope)
                case OpenEndpoint() | AttachEndpoint() as command if fails or self._has_no_end(command):
                    self.endpoint = self.attached = None
                    self.reports.append(EndpointFailed(self.other, command.greeting, "it could not be opened"))
                case OpenEndpoint(_, greeting, theirs):
                    self.num_endpoints += 1
                    self.endpoint = f"{self.boot}.{self.num_endpoints}".encode()
                    self.attached = theirs[0].metadata if theirs else None
                    self.reports.append(
                        EndpointOpened(self.other, greeting, (RankEnd(metadata=self.endpoint, regions=()),))
                    )
                    if theirs:
                        self.reports.append(EndpointAttached(self.other, greeting))
                case AttachEndpoint(_, greeting, theirs):
                    self.attached = theirs[0].metadata
                    self.reports.append(EndpointAttached(self.other, greeting))
                case FencePeer():
                    self.endpoint = self.attached = None
                    self.reports.append(PeerFenced(self.other, FenceResult.CLOSED))
        return frames


class Pair:
    """The two sides, and the frames between them in the order in which they left."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_starts = 0
        self.sides: dict[PeerName, Side] = {}
        self.flying: list[tuple[PeerName, Envelope]] = []
        for name in NAMES:
            self.start(name)

    def start(self, name: PeerName) -> None:
        """A new process: what was on its way to the old one is lost with its connections."""
        self.num_starts += 1
        (other,) = (each for each in NAMES if each != name)
        self.flying = [(dst, envelope) for dst, envelope in self.flying if dst != name]
        side = self.sides[name] = Side(name, other, self.num_starts)
        if ROLES[name] is Role.DECODE:
            side.links.dial(PeerAddress(name=other, url="sim://"), side.turn(self.now))
        self.settle(side)

    def settle(self, side: Side, fails: bool = False) -> None:
        self.flying += [(side.other, envelope) for envelope in side.work(fails)]
        self.check()

    def deliver(self, index: int) -> None:
        dst, envelope = self.flying.pop(index)
        self.sides[dst].links.receive(envelope, self.sides[dst].turn(self.now))
        self.settle(self.sides[dst])

    def report(self, side: Side) -> None:
        if not side.reports:
            return
        report = side.reports.pop(0)
        if isinstance(report, PeerFenced):
            assert not side.links.is_ready(side.other), (
                "tickets of the endpoint that is there would end with the old one"
            )
        else:
            side.links.on_endpoint(report, side.turn(self.now))
        self.settle(side)

    def beat(self, seconds: float, names: Sequence[PeerName] = NAMES) -> None:
        self.now += seconds
        for name in names:
            side = self.sides[name]
            for peer in side.links.beat(side.turn(self.now)):
                side.links.fence(peer.name, side.turn(self.now))
            self.settle(side)

    def check(self) -> None:
        for side in self.sides.values():
            peer = side.links.table.get(side.other)
            assert peer.boot is None or peer.over is None or peer.boot > peer.over
            assert not peer.is_ready or peer.boot is not None

    def heal(self) -> None:
        """From now on frames arrive, in order, and endpoints open."""
        for _ in range(20):
            self.beat(BEAT_S)
            for _ in range(100):
                for side in self.sides.values():
                    self.report(side)
                if self.flying:
                    self.deliver(0)
            assert not self.flying, "they greet without end"

    def check_ready(self) -> None:
        for side in self.sides.values():
            other = self.sides[side.other]
            peer = side.links.table.get(side.other)
            assert side.links.is_ready(side.other), f"{side.name}: {peer.state}"
            assert peer.boot == other.boot
            assert side.endpoint is not None
            assert side.attached is not None
        prefill, decode = (self.sides[name] for name in NAMES)
        assert prefill.attached == decode.endpoint, "pages would go to an endpoint that is gone"
        assert decode.attached == prefill.endpoint, "pages would come from an endpoint that nobody listens to"


KINDS = (
    *("deliver", "first") * 3,
    *("report", "beat") * 2,
    *("drop", "double", "report", "fail", "silence", "start", "died", "pause", "fence"),
)
OPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20)), max_size=60)


def perform(pair: Pair, kind: str, number: int) -> None:
    side = pair.sides[NAMES[number % 2]]
    match kind:
        case "first" if pair.flying:
            pair.deliver(0)
        case "deliver" if pair.flying:
            pair.deliver(number % len(pair.flying))
        case "drop" if pair.flying:
            pair.flying.pop(number % len(pair.flying))
        case "double" if pair.flying:
            pair.flying.append(pair.flying[number % len(pair.flying)])
        case "beat":
            pair.beat(BEAT_S)
        case "report":
            pair.report(side)
        case "fail":
            pair.settle(side, fails=True)
        case "silence":
            pair.beat(LOST_S + 0.1)
        case "pause":
            pair.beat(LOST_S + 0.1, [side.name])
        case "fence":  # a write failed, a drain was dirty
            side.links.fence(side.other, side.turn(pair.now))
            pair.settle(side)
        case "start":
            pair.start(side.name)
        case "died" if number % 4 == 0:
            other = pair.sides[side.other]
            other.links.died(side.name, other.turn(pair.now))
            pair.start(side.name)


@given(OPS)
def test_a_pair_comes_together_again(ops: list[tuple[str, int]]) -> None:
    pair = Pair()
    for kind, number in ops:
        perform(pair, kind, number)
    pair.heal()
    pair.check_ready()


def test_decode_attaches_to_the_endpoint_that_prefill_has_now() -> None:
    """Prefill fences a silent decode after it has answered, then hears its repeated Hello and opens another one."""
    pair = Pair()
    steps = (("report", 1), ("beat", 0), ("deliver", 0), ("report", 0), ("report", 0), ("pause", 0))
    for kind, number in steps:
        perform(pair, kind, number)
    pair.heal()
    pair.check_ready()
    assert pair.sides[NAMES[1]].attached == pair.sides[NAMES[0]].endpoint


def test_a_heartbeat_that_falls_due_while_decode_attaches_greets_nobody_anew() -> None:
    """Each further endpoint of decode's is one more that prefill has to fence before it opens its own again."""
    pair = Pair()
    begun = (("report", 1), ("deliver", 0), ("report", 0), ("report", 0), ("deliver", 0), ("beat", 0), ("report", 1))
    for kind, number in begun:
        perform(pair, kind, number)
    pair.heal()
    pair.check_ready()
    assert [side.num_endpoints for side in pair.sides.values()] == [1, 1]


def test_another_answer_that_comes_while_decode_attaches_is_not_missed() -> None:
    """Prefill ends the endpoint that it has answered with, and a late repetition of the same Hello has it make another
    one. Decode hears of that before its own transfer thread has attached to the first."""
    pair = Pair()
    begun = (("report", 1), ("beat", 0), ("deliver", 0), ("report", 0), ("report", 0), ("deliver", 1))
    anew = (("fence", 0), ("report", 0), ("deliver", 0), ("report", 0), ("report", 0), ("deliver", 0), ("report", 1))
    for kind, number in (*begun, *anew):
        perform(pair, kind, number)
    pair.heal()
    pair.check_ready()


def test_another_answer_that_is_lost_is_not_missed() -> None:
    """As above, when decode has attached, and the answer that tells of the second endpoint never comes."""
    pair = Pair()
    begun = (("report", 1), ("beat", 0), ("deliver", 0), ("report", 0), ("report", 0), ("deliver", 1), ("report", 1))
    anew = (("fence", 0), ("report", 0), ("deliver", 0), ("report", 0), ("report", 0), ("drop", 0))
    for kind, number in (*begun, *anew):
        perform(pair, kind, number)
    assert not pair.flying
    pair.heal()
    pair.check_ready()


def test_a_report_of_a_former_endpoint_makes_nobody_ready() -> None:
    """Prefill ends an endpoint that is still being opened, for writes of the one before, and decode sends Hello
    again."""
    pair = Pair()
    for kind, number in (("report", 1), ("deliver", 0), ("fence", 0), ("beat", 0), ("deliver", 0)):
        perform(pair, kind, number)
    while pair.sides[NAMES[0]].reports:
        perform(pair, "report", 0)
    pair.heal()
    pair.check_ready()
