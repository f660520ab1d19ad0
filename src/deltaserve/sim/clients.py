"""The clients of a run: what they ask, what they must get (I7, I8), and how they misbehave."""

from collections import Counter
from dataclasses import dataclass, field

from deltaserve.base.errors import FailReason, IntegrityError, RequestFailed
from deltaserve.base.ids import Namespace
from deltaserve.base.sampling import SamplingParams
from deltaserve.base.tokens import pack_u32
from deltaserve.request.client import Generation
from deltaserve.sim.chance import Chance
from deltaserve.sim.cluster import VOCAB, room_of
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.knobs import NAMESPACES, Knobs
from deltaserve.sim.oracle import oracle_output
from deltaserve.sim.process import Answer, SimFront
from deltaserve.wire.messages import CacheUse

_DEADLINE_S = 90.0
"""Longer than a run may take after `heal`: who waits for a deadline is found out."""


@dataclass(slots=True)
class Asked:
    """One sample: its answer so far, and the only right one."""

    generation: Generation
    expected: tuple[int, ...]
    answer: Answer
    at: float
    front: SimFront
    has_left: bool = False
    """The client cancelled: what it does not hear any more is no breach."""
    stopped_at: int | None = None
    """Output tokens after which a stop string was found."""

    @property
    def is_over(self) -> bool:
        return self.answer.ends > 0


@dataclass(slots=True)
class Clients:
    """All clients of one run."""

    knobs: Knobs
    chance: Chance
    counts: Counter[FaultKind]
    asked: list[Asked] = field(default_factory=list)
    _documents: list[list[int]] = field(default_factory=list)

    # ------------------------------------------------------------ asking

    def ask(self, front: SimFront, now: float) -> None:
        """One request of one or more samples."""
        traffic = self.knobs.traffic
        prompt = self._prompt()
        limit = traffic.largest - len(prompt)
        if self.chance.hits(0.03 * traffic.oddity):
            self.counts[FaultKind.BAD_INPUT] += 1
            prompt = prompt + [1] * (traffic.largest + self.chance.below(self.knobs.shape.page_size) + 1)
            limit = 1
        namespace = Namespace(self.chance.choose(NAMESPACES[: traffic.num_namespaces]))
        deadline_s = _DEADLINE_S
        if self.chance.hits(0.05 * traffic.oddity):
            self.counts[FaultKind.SHORT_DEADLINE] += 1
            deadline_s = self.chance.log_uniform(0.001, 2.0)
        max_tokens = self.chance.between(1, max(1, min(limit, traffic.max_output)))
        cache = CacheUse.BYPASS if self.chance.hits(0.05 * traffic.oddity) else CacheUse.NORMAL
        for _ in range(self.chance.between(1, traffic.max_samples)):
            self.submit(front, prompt, max_tokens, namespace, deadline_s, cache, now)

    def submit(
        self,
        front: SimFront,
        prompt: list[int],
        max_tokens: int,
        namespace: Namespace,
        deadline_s: float,
        cache: CacheUse,
        now: float,
    ) -> Asked:
        number = len(self.asked) + 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, temperature=0.0)
        generation = Generation(room_of(number), pack_u32(prompt), namespace, sampling, deadline_s, cache)
        pools = self.knobs.shape.num_pools
        expected = oracle_output(generation.prompt, max_tokens, VOCAB, pools, namespace)
        asked = Asked(generation, expected, Answer(), now, front)
        self.asked.append(asked)
        if front.is_alive:
            front.submit(generation, asked.answer)
        else:
            self.cut_off(asked)
        return asked

    def _prompt(self) -> list[int]:
        """New, or a continuation of an earlier one, with whatever output it got."""
        longest = self.knobs.traffic.largest - 1
        prompt: list[int] = []
        if self._documents and self.chance.hits(self.knobs.traffic.share):
            document = self.chance.choose(self._documents)
            prompt = document[: self.chance.between(1, len(document))]
        elif self.asked and self.chance.hits(self.knobs.traffic.share):
            earlier = self.chance.choose(self.asked)
            prompt = list(memoryview(earlier.generation.prompt).cast("I")) + list(earlier.expected)
        prompt = prompt + [self.chance.below(VOCAB) for _ in range(self.chance.between(1, max(1, longest // 2)))]
        prompt = prompt[:longest]
        self._documents.append(prompt)
        return prompt

    # ------------------------------------------------------------ misbehaving

    def disturb(self, kind: FaultKind) -> None:
        """A client leaves, asks twice, or has seen its stop string."""
        live = [a for a in self.asked if not a.is_over and a.front.is_alive]
        if not live:
            return
        asked = self.chance.choose(live)
        self.counts[kind] += 1
        match kind:
            case FaultKind.CLIENT_LEAVES:
                asked.has_left = True
                asked.front.cancel(asked.generation.room, FailReason.CANCELLED)
            case FaultKind.DUPLICATE_SUBMIT:
                twice = asked.front.submit(asked.generation, Answer())
                if twice.error is None or twice.error.reason is not FailReason.ROOM_IN_USE:
                    raise IntegrityError("I7: a room was taken twice")
            case FaultKind.STOP_STRING if asked.answer.tokens and asked.stopped_at is None:
                asked.stopped_at = self.chance.between(0, len(asked.answer.tokens))
                asked.front.finish(asked.generation.room, asked.stopped_at)
            case _:
                pass

    def cut_off(self, asked: Asked) -> None:
        """The connection to the front broke."""
        asked.answer.error = RequestFailed(FailReason.INTERNAL, "connection lost")
        asked.answer.ends += 1

    def front_died(self, front: SimFront) -> None:
        for asked in self.asked:
            if asked.front is front and not asked.is_over:
                self.cut_off(asked)

    # ------------------------------------------------------------ judging

    def all_over(self) -> bool:
        return all(asked.is_over for asked in self.asked)

    def check(self) -> None:
        """I7: at most one end. I8: nothing but a prefix of the oracle's answer, and all of it on success."""
        for asked in self.asked:
            answer = asked.answer
            got = tuple(answer.tokens)
            name = f"request {int.from_bytes(asked.generation.room, 'little')}"
            if answer.ends > 1:
                raise IntegrityError(f"I7: {name} ended {answer.ends} times")
            if got != asked.expected[: len(got)]:
                raise IntegrityError(f"I8: {name} got {got}, expected {asked.expected}")
            complete = answer.finish is not None and asked.stopped_at is None
            if complete and got != asked.expected:
                raise IntegrityError(f"I8: {name} succeeded with {len(got)} of {len(asked.expected)} tokens")
            if answer.ends and answer.finish is None and answer.error is None:
                raise IntegrityError(f"I8: {name} failed without a reason")

    def check_over(self) -> None:
        """I7, I11: every request has ended, by its deadline."""
        for asked in self.asked:
            if not asked.is_over:
                raise IntegrityError(f"I11: request {int.from_bytes(asked.generation.room, 'little')} never ended")
