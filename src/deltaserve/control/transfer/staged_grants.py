"""What a rank that reads may scatter: pages that a ticket was granted, once from each rank that writes.

The plan of a staged write is the writer's, and comes with the bytes (staged_reader.py). The control plane tells each
rank which pages a ticket covers (ExpectPages) when it grants them, and when it is over (ForgetPages). A plan for
anything else is refused whole, so that nothing is scattered outside what its ticket covers, whatever the plan says.
One that comes before the rank has heard of its ticket may wait for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from deltaserve.control.transfer.commands import ExpectPages, TicketId
from deltaserve.core.ids import PageId, PeerName, PoolId
from deltaserve.core.tokens import unpack_u32
from deltaserve.core.wire.staged_frames import StagedPages


class PlanVerdict(Enum):
    """What becomes of the plan of a staged write."""

    GRANTED = "granted"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    """No such ticket: not yet, or not any more."""


@dataclass(slots=True)
class _Granted:
    """A ticket's coverage, and what of it has come."""

    command: ExpectPages
    came: dict[tuple[int, str], bytearray] = field(default_factory=dict)
    """(writing rank, page group) |-> for each page, whether it was in a plan."""


class StagedGrants:
    """All tickets whose pages may be scattered to. For one thread."""

    def __init__(self, pools: Mapping[str, PoolId]) -> None:
        """`pools`: of each page group."""
        self._pools = pools
        self._tickets: dict[TicketId, _Granted] = {}

    def expect(self, command: ExpectPages) -> None:
        self._tickets.setdefault(command.ticket, _Granted(command))

    def forget(self, ticket: TicketId) -> None:
        self._tickets.pop(ticket, None)

    def drop_peer(self, peer: PeerName) -> None:
        self._tickets = {key: of for key, of in self._tickets.items() if of.command.peer != peer}

    def take(self, peer: PeerName, writer: int, ticket: TicketId, parts: Sequence[StagedPages]) -> PlanVerdict:
        """Judge the plan of a write of rank `writer`. What is granted is taken: the same pages come no second time."""
        granted = self._tickets.get(ticket)
        if granted is None or granted.command.peer != peer:
            return PlanVerdict.UNKNOWN
        places = [self._place(granted, writer, part) for part in parts]
        groups = {part.group for part in parts}
        if len(groups) < len(parts) or any(place is None for place in places):
            return PlanVerdict.REFUSED
        for part, place in zip(parts, places, strict=True):
            if place is not None:
                self._came(granted, writer, part.group)[place] = b"\x01" * (place.stop - place.start)
        return PlanVerdict.GRANTED

    def _place(self, granted: _Granted, writer: int, part: StagedPages) -> slice | None:
        """Where in the ticket's coverage a part is; None: it is not, or came before."""
        pool = self._pools.get(part.group)
        if pool is None or len(part.pages) % 4:
            return None
        covered, pages = granted.command.pages[pool], unpack_u32(part.pages)
        start = part.first - granted.command.firsts[pool]
        place = slice(start, start + len(pages))
        if start < 0 or not pages or covered[place] != tuple(map(PageId, pages)):
            return None
        return None if any(self._came(granted, writer, part.group)[place]) else place

    def _came(self, granted: _Granted, writer: int, group: str) -> bytearray:
        return granted.came.setdefault((writer, group), bytearray(len(granted.command.pages[self._pools[group]])))
