"""Life of a page as a table. Everything that changes a page's state goes through it.

    FREE --ALLOCATE--> OWNED --CACHE--> CACHED --EVICT--> FREE
                       OWNED --FREE--> FREE
    FREE --GRANT--> GRANTED --LAND--> OWNED
                    GRANTED --REVOKE--> QUARANTINED --DRAIN--> FREE

No event leads from GRANTED to FREE: a page a peer may write to leaves its ticket by evidence (LAND, DRAIN) only.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType

MAX_QUARANTINED_SHARE = 0.25
"""A worker with more of a pool in quarantine is not well: it gets no requests, and starts anew if that lasts."""


def is_crowded(quarantined: float, total: float) -> bool:
    """Whether too many of `total` pages are in quarantine."""
    return quarantined > MAX_QUARANTINED_SHARE * total


class PageState(IntEnum):
    """Who may touch a page."""

    FREE = 0
    """Nobody may touch it."""
    GRANTED = 1
    """A peer may write it under an open ticket."""
    OWNED = 2
    """One request may read and write it."""
    QUARANTINED = 3
    """Nobody may touch it: its ticket was revoked, and a late write may still land."""
    CACHED = 4
    """Whoever leases it from the prefix cache may read it; it is shared and never written."""


class PageEvent(Enum):
    """What happens to a page. Value = the method of `PagePool` that causes it."""

    ALLOCATE = "allocate"
    GRANT = "grant"
    LAND = "land"
    REVOKE = "revoke"
    DRAIN = "drain"
    FREE = "free"
    CACHE = "cache"
    EVICT = "evict"


PAGE_TRANSITIONS: Mapping[PageState, Mapping[PageEvent, PageState]] = MappingProxyType(
    {
        PageState.FREE: MappingProxyType({PageEvent.ALLOCATE: PageState.OWNED, PageEvent.GRANT: PageState.GRANTED}),
        PageState.GRANTED: MappingProxyType({PageEvent.LAND: PageState.OWNED, PageEvent.REVOKE: PageState.QUARANTINED}),
        PageState.OWNED: MappingProxyType({PageEvent.FREE: PageState.FREE, PageEvent.CACHE: PageState.CACHED}),
        PageState.QUARANTINED: MappingProxyType({PageEvent.DRAIN: PageState.FREE}),
        PageState.CACHED: MappingProxyType({PageEvent.EVICT: PageState.FREE}),
    }
)


def ends_of(event: PageEvent) -> tuple[PageState, PageState]:
    """(from, to) of an event. Each event has exactly one cell, so a batch needs one comparison, not one per page."""
    (ends,) = ((state, cells[event]) for state, cells in PAGE_TRANSITIONS.items() if event in cells)
    return ends
