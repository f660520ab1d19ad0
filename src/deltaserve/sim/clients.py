"""The clients of a run: what they ask, what they must get (I7, I8, I23, I36), and how they misbehave."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from msgspec.structs import replace

from deltaserve.control.front.client import Generation
from deltaserve.control.sched.plan import Sampled
from deltaserve.core.errors import FailReason, IntegrityError, RequestFailed
from deltaserve.core.hints import KvHints
from deltaserve.core.ids import Namespace
from deltaserve.core.priority import MAX_PRIORITY
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.wire.messages import CacheUse, FinishReason
from deltaserve.sim.chance import Chance
from deltaserve.sim.cluster import VOCAB, room_of
from deltaserve.sim.explanations import is_explained
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.knobs import NAMESPACES, Knobs
from deltaserve.sim.oracle import FIRST_REVISION, OracleAnswer, of_revision, oracle_answer
from deltaserve.sim.process import Answer, SimFront

_DEADLINE_S = 90.0
"""Longer than a run may take after `heal`: who waits for a deadline is found out."""

_LATE_S = 0.1
"""How late the end of a request may come, by its deadline."""


@dataclass(slots=True)
class Asked:
    """One sample: its answer so far, and the only right one."""

    generation: Generation
    right: OracleAnswer
    answer: Answer
    at: float
    front: SimFront
    flaws: set[FaultKind] = field(default_factory=set)
    """What is odd about it, or what its client did: reasons for which it may go unanswered."""
    was_ready: bool = True
    """Whether the front said that it can serve when this was asked."""
    is_cut_off: bool = False
    """Whether its front died."""
    stopped_at: int | None = None
    """Output tokens after which a stop string was found."""

    @property
    def is_over(self) -> bool:
        return self.answer.ends > 0

    @property
    def failed_by(self) -> FailReason | None:
        return None if self.answer.error is None else self.answer.error.reason

    @property
    def name(self) -> str:
        return f"request {int.from_bytes(self.generation.room, 'little')}"


@dataclass(slots=True)
class Clients:
    """All clients of one run."""

    knobs: Knobs
    chance: Chance
    counts: Counter[FaultKind]
    wishes: Chance
    """Draws what a request asks for besides tokens."""
    grammars: Chance
    """Draws which requests have a grammar."""
    hints: Chance
    """Draws which requests hint what comes next, in a third of the runs."""
    prefetches: Chance
    """Draws which prompts are to be made ready, in a sixth of the runs."""
    priorities: Chance
    """Draws how much sooner than others each request is to be taken: without effect in most runs."""
    asked: list[Asked] = field(default_factory=list)
    revisions: list[str] = field(default_factory=lambda: [FIRST_REVISION])
    """Fingerprints of the models that workers of this run have had."""
    _done_share: float = 0.0
    """Share of requests that say that no further turn comes; some do after all."""
    _retain_share: float = 0.0
    """Share of the others that say that one comes soon, which some do not."""
    _num_over: int = 0
    """How many of the first requests are known to be over."""
    _documents: list[list[int]] = field(default_factory=list)
    _prefetch_share: float = 0.0
    """Share of requests that only make a prompt ready."""
    _awaited: list[Generation] = field(default_factory=list)
    """Prompts that were made ready and whose requests come yet."""

    @classmethod
    def of(cls, seed: int, knobs: Knobs, counts: Counter[FaultKind]) -> "Clients":
        """The clients of a seed: what one stream draws disturbs no other."""
        return cls(
            knobs,
            Chance(seed, "clients"),
            counts,
            wishes=Chance(seed, "wishes"),
            grammars=Chance(seed, "grammars"),
            hints=Chance(seed, "hints"),
            prefetches=Chance(seed, "prefetch"),
            priorities=Chance(seed, "priorities"),
        )

    def __post_init__(self) -> None:
        if self.prefetches.hits(1 / 6):
            self._prefetch_share = self.prefetches.choose((0.1, 0.3, 0.5))
        if self.hints.hits(1 / 3):
            self._done_share = self.hints.choose((0.2, 0.5, 1.0))
            self._retain_share = self.hints.choose((0.0, 0.5, 1.0))

    # ------------------------------------------------------------ asking

    def ask(self, front: SimFront, now: float) -> None:
        """One request of one or more samples."""
        traffic = self.knobs.traffic
        prompt = self._prompt()
        limit = traffic.largest - len(prompt)
        flaws: set[FaultKind] = set()
        if self.chance.hits(0.03 * traffic.oddity):
            flaws.add(FaultKind.BAD_INPUT)
            prompt = prompt + [1] * (traffic.largest + self.chance.below(self.knobs.shape.page_size) + 1)
            limit = 1
        namespace = Namespace(self.chance.choose(NAMESPACES[: traffic.num_namespaces]))
        deadline_s = _DEADLINE_S
        if self.chance.hits(0.05 * traffic.oddity):
            flaws.add(FaultKind.SHORT_DEADLINE)
            deadline_s = self.chance.log_uniform(0.001, 2.0)
        max_tokens = self.chance.between(1, max(1, min(limit, traffic.max_output)))
        cache = CacheUse.BYPASS if self.chance.hits(0.05 * traffic.oddity) else CacheUse.NORMAL
        self.counts.update(flaws)
        num_samples, is_good = self.chance.between(1, traffic.max_samples), FaultKind.BAD_INPUT not in flaws
        makes_ready = is_good and self.prefetches.hits(self._prefetch_share)
        if is_good and not makes_ready and self._awaited:
            prompt, namespace = self._continued(prompt)
            max_tokens = min(max_tokens, traffic.largest - len(prompt))
        for _ in range(1 if makes_ready else num_samples):
            sampling = self._wishing(SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0), prompt, namespace)
            hints, priority = self._hints(), self.priorities.between(-MAX_PRIORITY, MAX_PRIORITY)
            packed = pack_u32(prompt)
            wanted = Generation(
                room_of(0), packed, namespace, sampling, deadline_s, cache, hints=hints, priority=priority
            )
            self.submit(front, self._prefetching(wanted) if makes_ready else wanted, now, flaws)

    def _hints(self) -> KvHints:
        is_done = self.hints.hits(self._done_share)
        if is_done or not self.hints.hits(self._retain_share):
            return KvHints(done=is_done)
        return KvHints(retain_ms=int(1000 * self.hints.log_uniform(0.01, 20.0)))

    def _prefetching(self, wanted: Generation) -> Generation:
        """The request of the same prompt that only makes it ready, as the server has it drawn: by one token, which no
        grammar binds. Half of the time one that begins with the prompt comes later."""
        retain_ms = int(1000 * self.prefetches.log_uniform(0.01, 20.0)) if self.prefetches.hits(0.5) else 0
        sampling = replace(wanted.sampling, max_tokens=1, min_tokens=0, grammar=None)
        hints = KvHints(prefetch=True, retain_ms=retain_ms)
        made = dataclasses.replace(wanted, sampling=sampling, hints=hints)
        if self.prefetches.hits(0.5):
            self._awaited.append(made)
        return made

    def _continued(self, rest: list[int]) -> tuple[list[int], Namespace]:
        """A prompt that was made ready and `rest` behind it, as far as that fits."""
        ready = self._awaited.pop(0)
        return [*unpack_u32(ready.prompt), *rest][: self.knobs.traffic.largest - 1], ready.namespace

    def _wishing(self, sampling: SamplingParams, prompt: list[int], namespace: Namespace) -> SamplingParams:
        """Grammars, log-probabilities, of the prompt too, ids that end the output: some that come, some that do not."""
        share = self.knobs.traffic.wishes
        if not share:
            return sampling
        if self.grammars.hits(share):
            sampling = replace(sampling, grammar=f"grammar {self.grammars.below(3)}")
        if self.wishes.hits(share):
            sampling = replace(sampling, logprobs=self.wishes.choose((0, 1, 5)))
        if self.wishes.hits(share):
            sampling = replace(sampling, prompt_logprobs=self.wishes.choose((0, 1, 5)))
        if self.wishes.hits(share):
            tokens = self._oracle(pack_u32(prompt), sampling, namespace).tokens
            ids = (self.wishes.choose(tokens), self.wishes.below(VOCAB))
            sampling = replace(sampling, stop_token_ids=ids, min_tokens=self.wishes.below(3))
        return sampling

    def _oracle(self, prompt: bytes, sampling: SamplingParams, namespace: Namespace) -> OracleAnswer:
        return oracle_answer(prompt, sampling, VOCAB, self.knobs.shape.pools, namespace)

    def _explained(self, asked: Asked, revision: str) -> OracleAnswer:
        """The one answer of a revision that begins with what came: pieces of two answers are none."""
        generation, answer = asked.generation, asked.answer
        heard = [Sampled(token, of) for token, of in zip_longest(answer.tokens, answer.logprobs)]
        pools, flavours = self.knobs.shape.pools, self.knobs.flavours
        wanted, namespace = generation.sampling, of_revision(generation.namespace, revision)
        return oracle_answer(generation.prompt, wanted, VOCAB, pools, namespace, heard, flavours)

    def submit(self, front: SimFront, wanted: Generation, now: float, flaws: Collection[FaultKind] = ()) -> Asked:
        """`wanted`, in a room of its own."""
        number = len(self.asked) + 1
        sampling = replace(wanted.sampling, seed=number)
        generation = dataclasses.replace(wanted, room=room_of(number), sampling=sampling)
        right = self._oracle(generation.prompt, sampling, generation.namespace)
        asked = Asked(generation, right, Answer(), now, front, set(flaws), front.core.ready() is None)
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
            output = earlier.right.tokens if self.knobs.flavours == 1 else earlier.answer.tokens
            prompt = [*unpack_u32(earlier.generation.prompt), *output]
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
                self._leave(asked)
            case FaultKind.DUPLICATE_SUBMIT:
                twice = asked.front.submit(asked.generation, Answer())
                if twice.error is None or twice.error.reason is not FailReason.ROOM_IN_USE:
                    raise IntegrityError("I7: a room was taken twice")
            case FaultKind.STOP_STRING if asked.answer.tokens and asked.stopped_at is None:
                asked.stopped_at = self.chance.between(0, len(asked.answer.tokens))
                asked.front.finish(asked.generation.room, asked.stopped_at)
            case _:
                pass

    def leave(self, asked: Asked) -> None:
        """Unless it has been answered."""
        if not asked.is_over and asked.front.is_alive:
            self.counts[FaultKind.CLIENT_LEAVES] += 1
            self._leave(asked)

    @staticmethod
    def _leave(asked: Asked) -> None:
        asked.flaws.add(FaultKind.CLIENT_LEAVES)
        asked.front.cancel(asked.generation.room, FailReason.CANCELLED)

    def cut_off(self, asked: Asked) -> None:
        """The connection to the front broke."""
        asked.is_cut_off = True
        asked.answer.error = RequestFailed(FailReason.INTERNAL, "connection lost")
        asked.answer.ends += 1

    def front_died(self, front: SimFront) -> None:
        for asked in self.asked:
            if asked.front is front and not asked.is_over:
                self.cut_off(asked)

    # ------------------------------------------------------------ judging

    def all_over(self) -> bool:
        """Asked after every event: of those found over once nothing is asked again."""
        while self._num_over < len(self.asked) and self.asked[self._num_over].is_over:
            self._num_over += 1
        return self._num_over == len(self.asked)

    def check(self) -> None:
        """I7: at most one end. I8: nothing but a prefix of the oracle's answer, and all of it on success. I36: with it
        each hint is answered."""
        for asked in self.asked:
            answer = asked.answer
            if answer.ends > 1:
                raise IntegrityError(f"I7: {asked.name} ended {answer.ends} times")
            asked.right = self._right(asked)
            if answer.ends and answer.finish is None and answer.error is None:
                raise IntegrityError(f"I8: {asked.name} failed without a reason")
            _check_lateness(asked)
            _check_hints(asked)
            self._check_reason(asked)

    def _right(self, asked: Asked) -> OracleAnswer:
        """What it should have got, all from one revision. Raises IntegrityError where none explains the answer."""
        contradictions = []
        for revision in self.revisions:
            is_known = revision == FIRST_REVISION and self.knobs.flavours == 1
            right = asked.right if is_known else self._explained(asked, revision)
            contradiction = _contradiction(asked, right)
            if contradiction is None:
                return right
            contradictions.append(contradiction)
        others = f", nor by any of {len(contradictions) - 1} other revisions" if len(contradictions) > 1 else ""
        raise IntegrityError(f"I8: {asked.name} {contradictions[0]}{others}")

    def _check_reason(self, asked: Asked) -> None:
        """I23: who is not answered is told why, and something has happened that explains it."""
        error = asked.answer.error
        if error is None or asked.is_cut_off or (error.reason is FailReason.NO_PEER and not asked.was_ready):
            return
        if error.reason in self._no_capacity() and len(self.asked) > self.knobs.shape.max_queued:
            return
        if not is_explained(error.reason, +self.counts, asked.flaws):
            raise IntegrityError(f"I23: {asked.name} failed without cause: {error.reason.value}, {error.message}")

    def _no_capacity(self) -> Collection[FailReason]:
        """What may be said to one request too many: also by the worker left to try, if that changes its role."""
        changes = self.counts[FaultKind.ROLE] > 0
        return (FailReason.OVERLOADED, FailReason.DRAINING) if changes else (FailReason.OVERLOADED,)


def _finish(sampling: SamplingParams, tokens: Sequence[int]) -> FinishReason:
    """How a complete answer ends."""
    is_long = len(tokens) > sampling.min_tokens or sampling.grammar is not None
    is_stopped = tokens[-1] in sampling.stop_token_ids and is_long
    return FinishReason.STOP if is_stopped else FinishReason.LENGTH


def _contradiction(asked: Asked, right: OracleAnswer) -> str | None:
    """I8: what of the answer is not as it should be; of one that is not complete, of what came."""
    answer, got, sampling = asked.answer, tuple(asked.answer.tokens), asked.generation.sampling
    if got != right.tokens[: len(got)]:
        return f"got {got}, expected {right.tokens}"
    complete = answer.finish is not None and asked.stopped_at is None
    if complete and got != right.tokens:
        return f"succeeded with {len(got)} of {len(right.tokens)} tokens"
    if complete and answer.finish != _finish(sampling, right.tokens).value:
        return f"finished by {answer.finish}"
    # Logprobs of every token that came, if they were asked for; of the prompt, all before the first token.
    if sampling.logprobs is not None and tuple(answer.logprobs) != right.logprobs[: len(answer.tokens)]:
        return f"got logprobs {answer.logprobs} for {len(answer.tokens)} tokens"
    of_prompt = tuple(answer.prompt_logprobs)
    if of_prompt != right.prompt_logprobs[: len(of_prompt)]:
        return f"got prompt logprobs {of_prompt}, expected {right.prompt_logprobs}"
    if answer.tokens and answer.prompt_logprobs_at_start != len(right.prompt_logprobs):
        return f"got {answer.prompt_logprobs_at_start} prompt logprobs before a token"
    return None


def _check_hints(asked: Asked) -> None:
    """I36: the end of an answer says what became of each hint, and of none that was not given."""
    end = asked.answer.last
    if asked.answer.finish is None or end is None:
        return
    told = () if end.usage is None else tuple(answer.hint for answer in end.usage.hints)
    if told != asked.generation.hints.answered:
        raise IntegrityError(f"I36: {asked.name} gave {asked.generation.hints} and was told of {told}")


def _check_lateness(asked: Asked) -> None:
    """I24: nobody waits beyond the deadline, unless the front stood still."""
    answer = asked.answer
    latest = max(asked.at + asked.generation.deadline_s, asked.front.resumed_at)
    if answer.ended_at > latest + _LATE_S:
        raise IntegrityError(f"I24: {asked.name} ended {answer.ended_at - latest:.2f} s after its deadline")
