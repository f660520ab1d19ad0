"""The scheduler of every role: who waits, who runs, and what the next step computes.

    waiting.add -> [waiting] -> waiting.admit -> [running] -> steps.plan / steps.commit ... -> finish | discard

This is what the three have in common: a request's end, and a change of role.
"""

from collections.abc import Callable

from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.running import Running
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.steps import Steps
from deltaserve.control.sched.waiting import Waiting
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace


class Scheduler:
    """Requests from the queue to their end."""

    def __init__(
        self, config: SchedConfig, cache: PrefixCache, budget: Budget, seed_of: Callable[[Namespace], bytes]
    ) -> None:
        self.running = Running(config, cache, budget, seed_of)
        self.waiting = Waiting(cache, budget, self.running)
        self.steps = Steps(cache, budget, self.running, self.waiting.holders)

    def finish(self, request: Request) -> None:
        """The end: what was computed stays in the tree, everything else is given back.

        The tree has it at once: the next turn of a conversation may be here before a step under way is committed.
        """
        leave = self.running.end_behind_step
        if self.steps.is_in_flight(request):
            self.running.share_under_step(request, request.num_tokens)
        else:
            self.running.leave_computed(request)
            leave = self.running.end
        self.waiting.forget(request)
        self.steps.end(request, leave)

    def share_step(self, request: Request, *, is_extend: bool) -> None:
        """After a step: hand over what an extend computed; of decode steps only what ends at a checkpoint."""
        if not self.steps.is_in_flight(request):
            self.running.share_step(request, is_extend=is_extend)
        elif is_extend:
            self.running.share_under_step(request, request.num_tokens)

    def discard(self, request: Request) -> None:
        """The end, leaving nothing in the tree."""
        self.waiting.forget(request)
        self.steps.end(request, self.running.give_back)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, runs, or is ending. (Rows that the executor is still to close are told with the next plan.)"""
        has_requests = len(self.waiting) or len(self.running)
        return self.steps.is_idle and not self.has_displaced and not has_requests

    @property
    def has_displaced(self) -> bool:
        """Whether requests lost their memory to others, and their owner was not told yet."""
        return self.running.has_retracted or self.waiting.holders.has_yielded

    def become(self, config: SchedConfig) -> None:
        """Another engine takes over, with another role's lengths. Raises StateError unless idle."""
        if not self.is_idle or config.max_running != self.running.config.max_running:
            raise StateError("a scheduler is taken over while it holds requests, or with other rows")
        self.running.become(config)
