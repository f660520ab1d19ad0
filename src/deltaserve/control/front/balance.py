"""Which pair serves a prompt. A policy is a row in POLICIES: who is there goes in, a pair comes out.

For the ttft policy a hot worker's residency does not count: above 1.25 times the mean load it competes as if cold, so a
hot prefix becomes resident on a second worker, and a cold one does not. Below a handful of rooms, or one more prompt,
a mean says nothing, hence the slack: a lone conversation is not pushed away from its prefix by its own load, nor a
burst of one prefix from the worker that is computing it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deltaserve.control.front.estimate import (
    Candidate,
    Computing,
    Estimate,
    Keeping,
    Prices,
    compute_times,
    estimate,
    keep_times,
)

_HOT_FACTOR = 1.25
_SLACK_ROOMS = 4.0
_SLACK_TOKENS = 4096.0
_TIE_S = 1e-4
"""Prices closer than this are a tie."""
_COST_TO_OTHERS = 0.25
"""Share of a prompt's compute time that is added for others, which wait for it: a hit is worth more than the time it
saves this prompt."""


@dataclass(frozen=True, slots=True)
class Choosable:
    """Who could serve a prompt: any computing worker with any keeping one, or a unified one alone."""

    computing: Sequence[Computing]
    keeping: Sequence[Keeping]
    unified: Sequence[Candidate] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen pair and what it was expected to cost."""

    pair: Candidate
    estimate: Estimate


class PairPolicy(Protocol):
    """Chooses a pair within one of several pools, each of which has one."""

    def choose(self, prompt_len: int, pools: Sequence[Choosable], prices: Prices) -> Choice: ...


class LowestTtft:
    """Lowest expected time to first token, each side for itself; ties go to the least load, then to the first name.

    Of an expert group, whose members' steps take equally long, ties go first to the member that has most of the prompt.
    """

    def choose(self, prompt_len: int, pools: Sequence[Choosable], prices: Prices) -> Choice:
        heat = _Heat.of(prompt_len, pools)
        return min((self._best(prompt_len, pool, prices, heat) for pool in pools), key=_rank)

    @staticmethod
    def _best(prompt_len: int, workers: Choosable, prices: Prices, heat: "_Heat") -> Choice:
        def computing_rank(side: Computing) -> tuple[int, float, str]:
            queue_s, prefill_s = compute_times(prompt_len, heat.computing(side))
            price = queue_s + prefill_s * (1.0 + _COST_TO_OTHERS)
            return round(price / _TIE_S), side.load.queue_tokens, side.load.worker

        def keeping_rank(side: Keeping) -> tuple[int, int, float, str]:
            side = heat.keeping(side)
            price = sum(keep_times(prompt_len, side, prices)) + side.load.step_s
            kept = side.hit if side.load.is_in_group else 0
            return round(price / _TIE_S), -kept, side.load.num_rooms, side.load.worker

        pairs = list(workers.unified)
        if workers.computing and workers.keeping:
            computing, keeping = min(workers.computing, key=computing_rank), min(workers.keeping, key=keeping_rank)
            pairs.append(Candidate(computing, keeping))
        choices = [Choice(pair, estimate(prompt_len, heat.pair(pair), prices)) for pair in pairs]
        return min(choices, key=_rank)


def _rank(choice: Choice) -> tuple[int, float, float, str]:
    """The lowest is chosen."""
    computing, keeping = choice.pair.computing.load, choice.pair.keeping.load
    price = choice.estimate.ttft_s + choice.estimate.prefill_s * _COST_TO_OTHERS
    return round(price / _TIE_S), keeping.num_rooms, computing.queue_tokens, keeping.worker


@dataclass(frozen=True, slots=True)
class _Heat:
    """Above which load a worker's residency does not count."""

    queue_tokens: float
    num_rooms: float

    @classmethod
    def of(cls, prompt_len: int, pools: Sequence[Choosable]) -> "_Heat":
        computing = [side for pool in pools for side in (*pool.computing, *(pair.computing for pair in pool.unified))]
        keeping = [side for pool in pools for side in (*pool.keeping, *(pair.keeping for pair in pool.unified))]
        queues, rooms = [side.load.queue_tokens for side in computing], [side.load.num_rooms for side in keeping]
        return cls(_bound(queues, _SLACK_TOKENS + prompt_len), _bound(rooms, _SLACK_ROOMS))

    def computing(self, side: Computing) -> Computing:
        return replace(side, hit=0) if side.hit and side.load.queue_tokens > self.queue_tokens else side

    def keeping(self, side: Keeping) -> Keeping:
        return replace(side, hit=0) if side.hit and side.load.num_rooms > self.num_rooms else side

    def pair(self, pair: Candidate) -> Candidate:
        return Candidate(self.computing(pair.computing), self.keeping(pair.keeping))


def _bound(loads: Sequence[float], slack: float) -> float:
    return _HOT_FACTOR * sum(loads) / max(1, len(loads)) + slack


class RoundRobin:
    """Every worker in turn, by name; load and residency do not count."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, prompt_len: int, pools: Sequence[Choosable], prices: Prices) -> Choice:
        turn = self._num_chosen
        self._num_chosen += 1
        alone = {pair.keeping.load.worker: pair for pool in pools for pair in pool.unified}
        keeping = {side.load.worker: (side, pool) for pool in pools if pool.computing for side in pool.keeping}
        names = sorted({*alone, *keeping})
        name = names[turn % len(names)]
        if name in alone:
            return Choice(alone[name], estimate(prompt_len, alone[name], prices))
        side, pool = keeping[name]
        computing = sorted(pool.computing, key=lambda side: side.load.worker)
        # One step further after each full cycle: all pairs occur, not just one diagonal.
        shift = turn // math.lcm(len(names), len(computing))
        pair = Candidate(computing[(turn + shift) % len(computing)], side)
        return Choice(pair, estimate(prompt_len, pair, prices))


POLICIES: Mapping[str, Callable[[], PairPolicy]] = {"ttft": LowestTtft, "round_robin": RoundRobin}
"""Value of load_balance_method |-> its policy."""
