"""A step that is planned and not committed, and whose requests it computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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
        """No row has guesses: where each goes on is known."""
        return bool(self.plan.items) and not any(item.num_drafts for item in self.plan.others)

    @property
    def extends(self) -> bool:
        """Whether it computes chunks of prompts."""
        return any(not item.is_decode for item in self.plan.others)

    def planned(self, result: StepResult) -> dict[RowId, tuple[Request, PlanItem]]:
        """What the answers of `result.items` are to, by row."""
        found = {item.row: (request, item) for request, item in self.others.items()}
        decode = self.plan.decode
        if result.decoded is None and decode is not None:
            pairs = zip(self.group.requests, decode.items(), strict=True)
            found |= {item.row: (request, item) for request, item in pairs}
        return found


class Following(NamedTuple):
    """Where a request goes on behind the steps under way."""

    num_draws: int
    """Tokens that they draw of it. With any it computes the last of them next."""
    start: int
    """The position that it computes next where they draw none."""


def following(request: Request, flights: Iterable[Flight]) -> Following:
    """Where the request goes on behind these steps, which are plain."""
    num_draws, start = 0, request.num_computed
    for flight in flights:
        item = flight.others.get(request)
        if item is not None:
            start = item.q_start + item.q_len
            num_draws += item.samples
        elif request in flight.group.members:
            num_draws += 1
    return Following(num_draws, start)
