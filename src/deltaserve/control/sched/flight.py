"""A step that is planned and not committed, and whose requests it computes."""

from dataclasses import dataclass

from deltaserve.control.sched.plan import DecodeRows, PlanItem, StepPlan, StepResult
from deltaserve.control.sched.request import Request
from deltaserve.core.ids import RowId


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """The requests of some decode rows."""

    rows: DecodeRows | None
    requests: tuple[Request, ...]
    members: frozenset[Request]


NO_GROUP = DecodeGroup(None, (), frozenset())


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is planned and not committed."""

    plan: StepPlan
    group: DecodeGroup
    """Requests of the plan's `decode`."""
    ending: tuple[Request, ...]
    """Those of the group that draw their last token in it, by their length."""
    others: dict[Request, PlanItem]

    def names(self, request: Request) -> bool:
        return request in self.group.members or request in self.others

    @property
    def is_plain(self) -> bool:
        """Every row decodes one token: where each goes on is known."""
        plan = self.plan
        return bool(plan.items) and all(item.is_decode and not item.num_drafts for item in plan.others)

    def planned(self, result: StepResult) -> dict[RowId, tuple[Request, PlanItem]]:
        """What the answers of `result.items` are to, by row."""
        found = {item.row: (request, item) for request, item in self.others.items()}
        decode = self.plan.decode
        if result.decoded is None and decode is not None:
            pairs = zip(self.group.requests, decode.items(), strict=True)
            found |= {item.row: (request, item) for request, item in pairs}
        return found
