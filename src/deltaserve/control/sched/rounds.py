"""What a member of an expert group does next: compute a plan, take part in a round of the others, or wait.

Every step of a member is a round of all: see compute/collective/expert_group.py. A member that has just computed joins
nobody before it is told that no plan follows; else two busy members would take turns, each idle in the rounds of the
other.
"""

from collections import deque
from enum import Enum
from typing import Literal

from deltaserve.control.sched.plan import StepPlan


class RoundPart(Enum):
    """What a member does in one round of its group."""

    NONE = "none"
    """It has no plan and computes for the others."""


class MemberRounds:
    """The rounds of an expert group as one member knows them."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()
        self._is_resting = True

    @property
    def is_resting(self) -> bool:
        """Whether there is no plan, and none is being made."""
        return self._is_resting and not self._plans

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan to be computed after those submitted before."""
        self._plans.append(plan)

    def rest(self) -> None:
        """Note that no plan follows for now."""
        self._is_resting = True

    def next_part(self, has_begun: bool) -> StepPlan | Literal[RoundPart.NONE] | None:
        """`has_begun`: another member is in a round that this one has not joined. None: wait."""
        if self._plans:
            self._is_resting = False
            return self._plans.popleft()
        return RoundPart.NONE if has_begun and self._is_resting else None
