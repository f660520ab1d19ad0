"""Which pair serves a prompt. A policy is a row in POLICIES: candidates in, one of them out, no other knowledge.

For the ttft policy a hot worker's residency does not count: above 1.25 times the mean load it competes as if cold, so a
hot prefix becomes resident on a second worker, and a cold one does not. Below a handful of rooms a mean says nothing,
hence the slack: a lone conversation is not pushed away from its prefix by its own load.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deltaserve.base.ids import PeerName
from deltaserve.routing.estimate import Candidate, Estimate, Prices, estimate

_HOT_FACTOR = 1.25
_SLACK_ROOMS = 4.0
_SLACK_TOKENS = 4096.0
_TIE_S = 1e-4
"""Estimates closer than this are a tie."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen pair and what it was expected to cost."""

    pair: Candidate
    estimate: Estimate


class PairPolicy(Protocol):
    """Chooses one of at least one candidate."""

    def choose(self, prompt_len: int, candidates: Sequence[Candidate], prices: Prices) -> Choice: ...


class LowestTtft:
    """Lowest estimated time to first token; ties go to the least load, then to the first name."""

    def choose(self, prompt_len: int, candidates: Sequence[Candidate], prices: Prices) -> Choice:
        hot_prefill = _hot({c.prefill.worker: c.prefill.queue_tokens for c in candidates}, _SLACK_TOKENS)
        hot_decode = _hot({c.decode.worker: c.decode.num_rooms for c in candidates}, _SLACK_ROOMS)
        priced = [Choice(c, estimate(prompt_len, _cooled(c, hot_prefill, hot_decode), prices)) for c in candidates]
        return min(priced, key=_rank)


class RoundRobin:
    """Every worker in turn, by name; load and residency do not count."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, prompt_len: int, candidates: Sequence[Candidate], prices: Prices) -> Choice:
        decodes = sorted({c.decode.worker for c in candidates})
        turn = self._num_chosen
        decode = decodes[turn % len(decodes)]
        prefills = sorted((c for c in candidates if c.decode.worker == decode), key=lambda c: c.prefill.worker)
        # One step further after each full cycle: all pairs occur, not just one diagonal.
        shift = turn // math.lcm(len(decodes), len(prefills))
        pair = prefills[(turn + shift) % len(prefills)]
        self._num_chosen += 1
        return Choice(pair, estimate(prompt_len, pair, prices))


POLICIES: Mapping[str, Callable[[], PairPolicy]] = {"ttft": LowestTtft, "round_robin": RoundRobin}
"""load_balance_method |-> policy."""


def _hot(loads: Mapping[PeerName, float], slack: float) -> set[PeerName]:
    bound = _HOT_FACTOR * sum(loads.values()) / len(loads) + slack
    return {worker for worker, load in loads.items() if load > bound}


def _cooled(pair: Candidate, hot_prefill: set[PeerName], hot_decode: set[PeerName]) -> Candidate:
    return replace(
        pair,
        prefill_hit=0 if pair.prefill.worker in hot_prefill else pair.prefill_hit,
        decode_hit=0 if pair.decode.worker in hot_decode else pair.decode_hit,
    )


def _rank(choice: Choice) -> tuple[int, float, float, str, str]:
    pair = choice.pair
    return (
        round(choice.estimate.ttft_s / _TIE_S),
        pair.decode.num_rooms,
        pair.prefill.queue_tokens,
        pair.decode.worker,
        pair.prefill.worker,
    )
