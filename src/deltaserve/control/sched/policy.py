"""How waiting requests are ranked: the values of --schedule-policy."""

from collections.abc import Callable
from dataclasses import dataclass

from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.request import Request

Rank = Callable[[Request], int]
"""request |-> how much it is worth to admit it now; more goes first."""

MAX_PASSED = 8
"""So many are taken by priority before the one that has waited longest is tried first."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """An order of waiting requests that is not their arrival."""

    rank: Rank
    most: int | None = None
    """Waiting requests that are ranked at a time, the oldest, where a rank costs a look-up; None: all."""
    max_passed: int | None = None
    """So many may be taken in a row while an older one waits; None: any number, as long as memory is not what the
    older one waits for."""


def by_arrival(cache: PrefixCache) -> Ranking | None:
    """No ranks: first come, first served."""
    return None


def by_cached_prefix(cache: PrefixCache) -> Ranking:
    """Longest cached prefix first: computes least, and puts rows that share pages into one batch (SGLang's `lpm`)."""

    def rank(request: Request) -> int:
        return cache.match(request.namespace, request.tokens, request.keys).num_tokens

    return Ranking(rank, most=64)


def by_high_priority(cache: PrefixCache) -> Ranking:
    """Higher values of `priority` first, as SGLang's scheduler and Dynamo's API have it; equal ones by arrival."""
    return Ranking(lambda request: request.priority, max_passed=MAX_PASSED)


def by_low_priority(cache: PrefixCache) -> Ranking:
    """Lower values of `priority` first, as vLLM's scheduler has it; equal ones by arrival."""
    return Ranking(lambda request: -request.priority, max_passed=MAX_PASSED)


POLICIES: dict[str, Callable[[PrefixCache], Ranking | None]] = {
    "fcfs": by_arrival,
    "lpm": by_cached_prefix,
    "priority": by_high_priority,
    "priority-low-first": by_low_priority,
}
"""Value of --schedule-policy |-> how waiting requests are ranked."""
