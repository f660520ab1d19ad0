"""One prefill and one decode worker with everything between them in view: frames, rooms, memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deltaserve.control.engine.api import Event
from deltaserve.control.engine.outflow import Outflow
from deltaserve.control.engine.rooms import DecodeRoom, PrefillRoom
from deltaserve.control.engine.serving import Serving
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.front.streams import Placement
from deltaserve.control.peer.link import FrameIn
from deltaserve.core.errors import FailReason
from deltaserve.core.hints import NO_HINTS, KvHints
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.wire.messages import CacheUse, Envelope, Message, PrefillWay, TokenRun, Tokens, Usage
from deltaserve.sim.cluster import VOCAB, Shape
from deltaserve.sim.loopback import Fabric, Fate, Part
from deltaserve.sim.process import Answer, SimWorker
from tests.sim.small_cluster import Cluster, oracle_output

PREFILL, DECODE, FRONT = PeerName("prefill-0"), PeerName("decode-0"), PeerName("front")
PAGE_BYTES = 64
"""Bytes of a page of the stamp model with pages of 4 tokens."""
FIRST_TOKEN = range(45, 105)
"""Bytes that a first token may have: fewer lengths than a page has bytes."""
M = TypeVar("M")
Delays = Callable[[PeerName, PeerName, Envelope], Sequence[float] | None]
"""What happens to a frame; None: what a healthy link does."""


def act(worker: SimWorker, call: Callable[[EngineTurn], object]) -> None:
    """Have a worker's engine do, between two turns, what no event asks for."""
    turn = EngineTurn(worker.now, False, [])
    call(turn)
    worker.instance._pending += turn.actions


def healthy(src: PeerName, dst: PeerName, envelope: Envelope) -> None:
    return None


def slow_fabric(seconds: float = 0.02) -> Fabric:
    """Writes take their time."""
    half = seconds / 2
    return Fabric(policy=lambda p: Fate(lands=(Part(half, 1), Part(seconds)), notified_s=seconds, told_s=seconds))


@dataclass
class Asked:
    """A request, its answer so far, and what the answer must be."""

    room: Room
    prompt: tuple[int, ...]
    answer: Answer
    expected: tuple[int, ...]

    @property
    def usage(self) -> Usage:
        assert self.answer.last is not None
        assert self.answer.last.usage is not None
        return self.answer.last.usage


@dataclass
class Held:
    """What a worker holds for requests; all zero when it is quiet."""

    leases: float
    owned: float
    granted: float
    quarantined: float
    protected: float
    tickets: float

    @property
    def is_nothing(self) -> bool:
        return self == Held(0, 0, 0, 0, 0, 0)


def token_runs(tokens: Tokens) -> list[TokenRun]:
    """All that a frame tells, room by room."""
    if tokens.next is None:
        return list(tokens.runs)
    values = unpack_u32(tokens.next.tokens)
    told = [
        TokenRun(room=place.room, epoch=place.epoch, start=place.start + tokens.next.ahead, tokens=pack_u32([token]))
        for place, token in zip(tokens.next.places, values, strict=True)
    ]
    return [*tokens.runs, *told]


@dataclass
class Duo:
    """A ready cluster of two; every frame on the way is kept."""

    shape: Shape = field(default_factory=Shape)
    fabric: Fabric = field(default_factory=Fabric)
    link: Delays = healthy

    def __post_init__(self) -> None:
        self.frames: list[tuple[PeerName, PeerName, Envelope]] = []
        self.cluster = Cluster(self.shape, link=self._carry, fabric=self.fabric)
        self.world = self.cluster.world
        self.cluster.warm_up()
        self.world.run(until=self.world.now + 0.2)

    def _carry(self, src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float]:
        self.frames.append((src, dst, envelope))
        delays = self.link(src, dst, envelope)
        return (0.0005,) if delays is None else delays

    # ------------------------------------------------------------ the two

    @property
    def decode(self) -> Serving:
        return self.worker(DECODE).instance.serving

    @property
    def prefill(self) -> Outflow:
        return self.worker(PREFILL).instance.outflow

    def metrics(self, name: PeerName) -> dict[str, float]:
        return self.worker(name).instance.metrics()

    def worker(self, name: PeerName) -> SimWorker:
        return self.cluster.world.workers[name]

    def decode_room(self, asked: Asked) -> DecodeRoom | None:
        return self.decode.rooms.get(asked.room)

    def prefill_room(self, asked: Asked) -> PrefillRoom | None:
        return self.prefill.rooms.get((DECODE, asked.room))

    def sent(self, kind: type[M], src: PeerName = PREFILL) -> list[M]:
        """Bodies of one type that `src` has sent so far."""
        return [e.body for s, _, e in self.frames if s == src and isinstance(e.body, kind)]

    # ------------------------------------------------------------ traffic

    def weigh(self, prefill_wait_len: int, pull_wait_len: int = 0) -> None:
        """Have the front say of every prompt that prefill computes so much until it would be handed over, and so much
        behind a pull of all of that. 0: it says nothing of it."""
        pulled_len = prefill_wait_len if pull_wait_len else 0
        way = PrefillWay(
            queue_len=0, lacking_len=prefill_wait_len, handover_len=0, pulled_len=pulled_len, pull_len=pull_wait_len
        )
        placer = self.cluster.front.core.placer
        place = placer.place

        def placed(*placing: Any) -> Placement:
            return replace(place(*placing), prefill_way=way if prefill_wait_len else None)

        placer.place = placed  # type: ignore[assignment, method-assign]

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        namespace: str = "",
        cache: CacheUse = CacheUse.NORMAL,
        hints: KvHints = NO_HINTS,
        priority: int = 0,
    ) -> Asked:
        plain = self.cluster.generation(prompt, max_tokens, namespace, cache)
        generation = replace(plain, hints=hints, priority=priority)
        expected = oracle_output(pack_u32(prompt), max_tokens, VOCAB, self.shape.pools, generation.namespace)
        return Asked(generation.room, tuple(prompt), self.cluster.front.submit(generation), expected)

    def serve(self, prompt: Sequence[int], max_tokens: int = 3, **options: str | KvHints) -> Asked:
        """One request, from beginning to end."""
        asked = self.ask(prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.settle(asked)
        return asked

    def cancel(self, asked: Asked) -> None:
        self.cluster.front.cancel(asked.room, FailReason.CANCELLED)

    def until(self, done: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Run until something is so; the books are checked after every event."""

        def checked() -> bool:
            self.cluster.check()
            return done()

        self.world.run(until=self.world.now + limit_s, done=checked)
        assert done(), "it never happened"

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds

        def checked() -> bool:
            self.cluster.check()
            return False

        self.world.run(until=end, done=checked)

    def settle(self, *asked: Asked, limit_s: float = 30.0) -> None:
        """They end with the right answers, and nothing is left behind."""
        self.until(lambda: all(a.answer.ends for a in asked), limit_s)
        for one in asked:
            assert one.answer.error is None, one.answer.error
            assert (tuple(one.answer.tokens), one.answer.ends) == (one.expected, 1)
        self.quiet()

    def quiet(self, limit_s: float = 5.0) -> None:
        self.until(lambda: self.held(DECODE).is_nothing and self.held(PREFILL).is_nothing, limit_s)

    def inject(self, dst: PeerName, src: PeerName, body: Message, **changes: int) -> None:
        """A frame out of nowhere, addressed as the real ones are."""
        fields = {"src_boot": self.boot(src), "dst_boot": self.boot(dst)} | changes
        envelope = Envelope(src=src, body=body, **fields)
        self.worker(dst).handle(FrameIn(envelope))

    def report(self, dst: PeerName, event: Event) -> None:
        self.worker(dst).handle(event)

    def boot(self, name: PeerName) -> int:
        return self.cluster.front.core._config.boot if name == FRONT else self.worker(name).instance.config.boot

    # ------------------------------------------------------------ memory

    def held(self, name: PeerName) -> Held:
        metrics = self.worker(name).instance.metrics()

        def pages(state: str) -> float:
            return sum(v for k, v in metrics.items() if k.startswith("deltaserve_pages{") and f'"{state}"' in k)

        protected = sum(v for k, v in metrics.items() if k.startswith("deltaserve_pages_protected"))
        return Held(
            metrics["deltaserve_leases"],
            pages("owned"),
            pages("granted"),
            pages("quarantined"),
            protected,
            metrics["deltaserve_tickets_open"],
        )

    def cached_pages(self, name: PeerName) -> float:
        return self.worker(name).instance.metrics()['deltaserve_pages{pool="0",state="cached"}']

    def bytes_sent(self) -> float:
        return self.metrics(PREFILL)["deltaserve_transfer_bytes_sent_total"]

    def flush(self, name: PeerName) -> None:
        """Empty a worker's tree."""
        instance = self.decode if name == DECODE else self.prefill
        instance.parts.cache.clear()
