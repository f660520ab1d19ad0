"""How waiting requests are ranked: the values of --schedule-policy."""

from collections.abc import Callable

from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.request import Request

Rank = Callable[[Request], int]
"""request |-> how much it is worth to admit it now; more goes first."""


def by_arrival(cache: PrefixCache) -> Rank | None:
    """No ranks: first come, first served."""
    return None


def by_cached_prefix(cache: PrefixCache) -> Rank:
    """Longest cached prefix first: computes least, and puts rows that share pages into one batch (SGLang's `lpm`)."""

    def rank(request: Request) -> int:
        return cache.match(request.namespace, request.tokens, request.keys).num_tokens

    return rank


POLICIES: dict[str, Callable[[PrefixCache], Rank | None]] = {"fcfs": by_arrival, "lpm": by_cached_prefix}
"""Value of --schedule-policy |-> how waiting requests are ranked."""
