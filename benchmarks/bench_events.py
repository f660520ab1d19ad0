"""What an event costs on a worker's loop while 1,000 requests of 100,000 tokens wait and decode is full.

    python -m benchmarks.bench_events [--rooms N] [--tokens N] [--json]

A decode and a prefill engine with everything production has but the network and the model: frames go in, the turn that
follows is timed with them, and so is the work of the codec on both. Decode's memory holds one running request of the
same length and no second one; prefill has computed ahead what it may. Times are microseconds on one core. The bar: p50
<= 1,000 for every event.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from deltaserve.control.engine.core import EngineCore
from deltaserve.control.engine.rooms import PrefillRoom
from deltaserve.control.peer.link import FrameIn, SendFrame
from deltaserve.control.sched.plan import ItemResult, Sampled, StepPlan, StepResult
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Namespace, PeerName, Room
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.codec import decode, encode
from deltaserve.core.wire.messages import (
    Cancel,
    Component,
    Envelope,
    Grant,
    Heartbeat,
    Message,
    Offer,
    PeerAddress,
    Starting,
    Submit,
)
from deltaserve.sim.cluster import FRONT, SECRET, VOCAB, Shape, url_of
from deltaserve.sim.oracle import FIRST_REVISION
from tests.sim.small_cluster import Cluster

PAGE_SIZE = 64
PREFILL, DECODE = PeerName("prefill-0"), PeerName("decode-0")
SPACE = Namespace("bench")
SEED = seed_key(SECRET, FIRST_REVISION, PAGE_SIZE, SPACE)
NUM_EVENTS, NUM_PROMPTS = 300, 60


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of event; times in microseconds."""

    event: str
    p50: float
    p99: float
    samples: int


class Bench:
    """Two engines after their handshake, taken out of the simulated network."""

    def __init__(self, num_tokens: int, num_rooms: int) -> None:
        pages = -(-num_tokens // PAGE_SIZE)
        shape = Shape(
            page_size=PAGE_SIZE,
            prefill_pages=pages + pages // 2,
            decode_pages=pages + pages // 2,
            max_running=64,
            max_queued=2 * num_rooms + 1000,
            chunk_len=2048,
            context_len=num_tokens + 10_000,
            reserve_len=512,
        )
        cluster = Cluster(shape)
        cluster.warm_up()
        cluster.world.run(until=cluster.world.now + 1.0)
        workers = cluster.world.workers
        self.decode, self.prefill = workers[DECODE].instance, workers[PREFILL].instance
        self._front_boot = cluster.front.core._config.boot
        self.now = cluster.world.now
        self._num_tokens = num_tokens
        self._num_rooms = 0
        self._rng = np.random.default_rng(1)

    def frame(self, src: PeerName, to: EngineCore, body: Message) -> FrameIn:
        boots = {FRONT: self._front_boot, DECODE: self.decode.config.boot, PREFILL: self.prefill.config.boot}
        return FrameIn(Envelope(src=src, src_boot=boots[src], dst_boot=to.config.boot, body=body))

    def event(self, to: EngineCore, event: FrameIn) -> list[Message]:
        """One event and the turn it leads to; what was sent."""
        to.handle(event, self.now)
        return [action.envelope.body for action in to.turn(self.now) if isinstance(action, SendFrame)]

    def framed(self, to: EngineCore, events: list[FrameIn]) -> Callable[[], object]:
        """One of `events` and the turn it leads to, from bytes to bytes, at each call."""
        frames = iter([encode(event.envelope) for event in events])

        def call() -> list[bytes]:
            to.handle(FrameIn(decode(next(frames))), self.now)
            return [encode(action.envelope) for action in to.turn(self.now) if isinstance(action, SendFrame)]

        return call

    def submit(self, prefill: PeerName | None) -> Submit:
        self._num_rooms += 1
        prompt = self._rng.integers(VOCAB, size=self._num_tokens, dtype=np.dtype("<u4")).tobytes()
        return Submit(
            room=Room(self._num_rooms.to_bytes(16, "little")),
            epoch=1,
            prompt=prompt,
            prompt_len=self._num_tokens,
            keys=bytes(extend_keys(SEED, prompt, PAGE_SIZE)),
            namespace=SPACE,
            sampling=SamplingParams(max_tokens=8192, seed=1),
            prefill=None if prefill is None else PeerAddress(name=prefill, url=url_of(prefill)),
            remaining_ms=3_600_000,
        )

    def offer(self) -> Offer:
        """An offer of a prompt like those of `submit`."""
        submit = self.submit(PREFILL)
        return Offer(
            room=submit.room,
            attempt=1,
            prompt=submit.prompt,
            prompt_len=submit.prompt_len,
            namespace=submit.namespace,
            sampling=submit.sampling,
            remaining_ms=submit.remaining_ms,
        )

    def grant(self, room: Room, number: int) -> Grant:
        """A grant for a whole prompt."""
        pages = pack_u32(range(-(-self._num_tokens // PAGE_SIZE)))
        coverage = (Component(pool=0, first=0, pages=pages),)
        return Grant(room=room, attempt=1, ticket=number, coverage=coverage)

    def fill(self, num_rooms: int) -> None:
        """One request runs on decode, all others wait on both sides."""
        self.event(self.decode, self.frame(FRONT, self.decode, self.submit(None)))
        while any(r.num_tokens - r.num_computed > 1 for r in self.decode.parts.scheduler.running):
            self.step(self.decode)
        for _ in range(num_rooms):
            sent = self.event(self.decode, self.frame(FRONT, self.decode, self.submit(PREFILL)))
            (offer,) = (body for body in sent if isinstance(body, Offer))
            self.event(self.prefill, self.frame(DECODE, self.prefill, offer))
            starting = Starting(room=offer.room, attempt=offer.attempt, cached_len=0)
            self.event(self.decode, self.frame(PREFILL, self.decode, starting))
        while self.prefill.parts.scheduler.steps.has_work():
            self.step(self.prefill)

    def step(self, engine: EngineCore) -> None:
        plan = engine.plan(self.now)
        if plan is None:
            raise RuntimeError("nothing to compute")
        engine.commit(answer(plan), self.now)
        engine.turn(self.now)


def waiting_at(prefill: EngineCore) -> list[tuple[int, PrefillRoom]]:
    """Some rooms that were not announced, each with a ticket's number."""
    waiting = [room for room in prefill.outflow.rooms.values() if not room.is_announced]
    return list(enumerate(waiting[:NUM_PROMPTS], 1))


def answer(plan: StepPlan) -> StepResult:
    items = tuple(ItemResult(item.row, (Sampled(7),) if item.samples else ()) for item in plan.items)
    return StepResult(plan.step, items).compact(plan)


def timed(
    event: str, call: Callable[[], object], samples: int = NUM_EVENTS, before: Callable[[], object] = lambda: None
) -> Row:
    gc.collect()
    times = []
    for _ in range(samples):
        before()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return Row(event, statistics.median(times), times[int(len(times) * 0.99)], len(times))


def measure(num_tokens: int, num_rooms: int) -> list[Row]:
    bench = Bench(num_tokens, num_rooms)
    bench.fill(num_rooms)
    decode, prefill = bench.decode, bench.prefill
    if len(decode.serving.rooms) != num_rooms + 1 or len(prefill.outflow) != num_rooms:
        raise RuntimeError(f"{len(decode.serving.rooms)} and {len(prefill.outflow)} rooms wait")
    beat_d, beat_p = bench.frame(PREFILL, decode, Heartbeat()), bench.frame(DECODE, prefill, Heartbeat())
    beats = {decode: [beat_d, bench.frame(FRONT, decode, Heartbeat())], prefill: [beat_p]}
    rows = [
        timed("decode: a heartbeat", bench.framed(decode, [beat_d] * NUM_EVENTS)),
        timed("decode: a step (commit, turn, plan)", lambda: bench.step(decode)),
        timed("prefill: a heartbeat", bench.framed(prefill, [beat_p] * NUM_EVENTS)),
    ]

    def later(engine: EngineCore) -> None:
        bench.now += 0.1
        for beat in beats[engine]:
            engine.handle(beat, bench.now)

    def tick(engine: EngineCore) -> None:
        engine.tick(bench.now)
        engine.turn(bench.now)

    for name, engine in {"decode": decode, "prefill": prefill}.items():
        what = f"{name}: the timer, ten times a second"
        rows.append(timed(what, partial(tick, engine), before=partial(later, engine)))
    ids = [room.room for room in decode.serving.rooms if room.prefill is not None][:NUM_EVENTS]
    leaves = [bench.frame(FRONT, decode, Cancel(room=room, reason=FailReason.CANCELLED)) for room in ids]
    rows.append(timed("decode: a client leaves", bench.framed(decode, leaves), len(leaves)))
    grants = [bench.frame(DECODE, prefill, bench.grant(room.room, number)) for number, room in waiting_at(prefill)]
    rows.append(timed("prefill: a Grant", bench.framed(prefill, grants), len(grants)))
    submits = [bench.frame(FRONT, decode, bench.submit(PREFILL)) for _ in range(NUM_PROMPTS)]
    rows.append(timed("decode: a Submit", bench.framed(decode, submits), NUM_PROMPTS))
    offers = [bench.frame(DECODE, prefill, bench.offer()) for _ in range(NUM_PROMPTS)]
    rows.append(timed("prefill: an Offer", bench.framed(prefill, offers), NUM_PROMPTS))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.tokens, args.rooms)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"{args.rooms} rooms of {args.tokens} tokens wait, decode is full")
    print(f"{'event':<42}{'p50 us':>10}{'p99 us':>10}{'samples':>9}")
    for row in rows:
        print(f"{row.event:<42}{row.p50:>10.1f}{row.p99:>10.1f}{row.samples:>9}")


if __name__ == "__main__":
    main()
