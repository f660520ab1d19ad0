"""What placing a request costs the front, and what its workers then say, on workers that exist as frames only.

    python -m benchmarks.bench_front [--sizes 1 8 64] [--lengths 1000 4000 8000 100000] [--count N] [--rooms N]

For each number of workers of each kind and each prompt length: the CPU time FrontCore.submit takes (page keys, price of
every worker, books, the Submit message; not its encoding), p50 and p99 over `count` prompts of which each continues
one of sixteen documents that are resident on a quarter of the workers; and the part of it that is the choice of the
pair. Then, with `rooms` rooms placed, the CPU time of what comes from workers: a step's tokens (per token, from a frame
of one and of all rooms of a worker), a report, the timer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from random import Random

from rich.console import Console
from rich.table import Table

from deltaserve.control.front.client import Generation
from deltaserve.control.front.events import FrontConfig, Member
from deltaserve.control.front.front_core import FrontCore
from deltaserve.control.front.streams import KeyedSample
from deltaserve.control.peer.link import FrameIn, SendFrame
from deltaserve.core.ids import Boot, Namespace, PeerName, Role, Room
from deltaserve.core.keys import PromptKeys, extend_keys, seed_check, seed_key
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Envelope, Events, Facts, Hello, Message, Status, Submit, TokenRun, Tokens

SECRET, FINGERPRINT, PAGE, VOCAB = b"secret", "model", 64, 32000
NUM_DOCUMENTS = 16
SUFFIX_LEN = 200


class Bench:
    """A front with so many prefill and decode workers, all ready, and documents known to some of them."""

    def __init__(self, num_workers: int, prompt_len: int) -> None:
        names = [(f"{role.value}-{i}", role) for role in (Role.PREFILL, Role.DECODE) for i in range(num_workers)]
        members = tuple(Member(PeerName(name), role, f"tcp://127.0.0.1/{name}") for name, role in names)
        config = FrontConfig(PeerName("front"), Boot(1), members, SECRET, 1e5, max_waiting_tokens=1 << 40)
        self.front = FrontCore(config)
        self.front.start(0.0)
        self._draw = Random(num_workers)
        self._documents = [self._random(prompt_len - SUFFIX_LEN) for _ in range(NUM_DOCUMENTS)]
        self._seed = seed_key(SECRET, FINGERPRINT, PAGE, Namespace(""))
        for name, role in names:
            self._introduce(name, role)

    def _introduce(self, name: str, role: Role) -> None:
        facts = Facts(
            page_size=PAGE,
            pool_pages=(100_000,),
            max_context_len=1 << 20,
            max_running=256,
            vocab_size=VOCAB,
            keys_seed_check=seed_check(SECRET, FINGERPRINT),
        )
        self._say(name, Hello(role=role.value, compat={"model": "m"}, facts=facts))
        self._say(name, self._status())
        held = [document for document in self._documents if self._draw.random() < 0.25]
        stored = b"".join(extend_keys(self._seed, pack_u32(document), PAGE) for document in held)
        self._say(name, Events(first=0, stored=stored, evicted=b"", snapshot=True))

    def _status(self) -> Status:
        return Status(
            num_waiting=3,
            waiting_tokens=self._draw.randrange(8000),
            num_running=self._draw.randrange(64),
            free_pages=(50_000,),
            evictable_pages=(40_000,),
            quarantined_pages=(0,),
            num_pages=(100_000,),
            prefill_tokens_per_s=8000.0,
            decode_step_s=0.02,
        )

    def _say(self, name: str, body: Message) -> None:
        self.front.handle(FrameIn(Envelope(src=name, src_boot=7, dst_boot=1, body=body)), 0.0)

    def _random(self, count: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(count)]

    def generation(self, number: int) -> Generation:
        prompt = [*self._draw.choice(self._documents), *self._random(SUFFIX_LEN)]
        sampling = SamplingParams(max_tokens=100, seed=number)
        return Generation(Room(number.to_bytes(16, "big")), pack_u32(prompt), Namespace(""), sampling, 600.0)

    def submit_ms(self, count: int) -> list[float]:
        asked = [self.generation(number) for number in range(count)]
        return sorted(_ms(lambda one=one: self.front.submit(one, 0.01)) for one in asked)  # type: ignore[misc]

    def choice_ms(self, count: int) -> list[float]:
        asked = [self.generation(number) for number in range(count)]
        samples = [KeyedSample(one, PromptKeys(lambda *_: self._seed, one.prompt)) for one in asked]
        return sorted(_ms(lambda one=one: self.front.placer.choose(one, 0.01)) for one in samples)  # type: ignore[misc]

    def events_us(self, num_rooms: int, count: int) -> dict[str, list[float]]:
        """Event |-> sorted microseconds, after `num_rooms` more rooms were placed."""
        placed: dict[str, list[bytes]] = {}
        for number in range(num_rooms):
            for action in self.front.submit(self.generation(1 << 32 | number), 0.01):
                if isinstance(action, SendFrame) and isinstance(action.envelope.body, Submit):
                    placed.setdefault(action.peer, []).append(action.envelope.body.room)
        name, rooms = max(placed.items(), key=lambda item: len(item[1]))
        alone, others = rooms[:1], rooms[1:]
        singles: list[Message] = [self._step(alone, step) for step in range(count)]
        steps: list[Message] = [self._step(others, step) for step in range(min(count, 90))]
        reports: list[Message] = [self._status()] * count
        times = {
            "a token in a frame of its own": self._event_us(name, singles),
            f"a token in a frame of {len(others)}": [us / len(others) for us in self._event_us(name, steps)],
            "a report": self._event_us(name, reports),
        }
        beats = [0.5 * number for number in range(1, 5)]
        ticks = [_ms(lambda now=now: self.front.tick(now)) for now in beats]  # type: ignore[misc]
        return times | {"the timer, twice a second": sorted(1000 * tick for tick in ticks)}

    def _event_us(self, worker: str, bodies: list[Message]) -> list[float]:
        return sorted(1000 * _ms(lambda body=body: self._say(worker, body)) for body in bodies)  # type: ignore[misc]

    @staticmethod
    def _step(rooms: list[bytes], step: int) -> Tokens:
        return Tokens(runs=tuple(TokenRun(room=room, epoch=1, start=step, tokens=pack_u32([7])) for room in rooms))


def _ms(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 8000, 100_000])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--rooms", type=int, default=2000)
    args = parser.parse_args()
    table = Table("workers of each kind", "prompt", "submit, p50 ms", "p99", "of it the choice, p50 ms", "p99")
    for size in args.sizes:
        for length in args.lengths:
            choice, submit = Bench(size, length).choice_ms(args.count), Bench(size, length).submit_ms(args.count)
            figures = [statistics.median(submit), _p99(submit), statistics.median(choice), _p99(choice)]
            table.add_row(str(size), f"{length:,}", *(f"{value:.2f}" for value in figures))
    console = Console(width=120)
    console.print(table)
    events = Table("event", "p50 us", "p99", title=f"{args.rooms} rooms, {max(args.sizes)} workers of each kind")
    for event, times in Bench(max(args.sizes), 1000).events_us(args.rooms, args.count).items():
        events.add_row(event, f"{statistics.median(times):.1f}", f"{_p99(times):.1f}")
    console.print(events)


def _p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))]


if __name__ == "__main__":
    main()
