"""Distinct types for every number that could be mistaken for another one.

A page cannot be passed as a row: mypy tells them apart, at no cost at run time.
"""

from enum import Enum
from typing import NewType

PageId = NewType("PageId", int)
"""Index of a page in one pool of this rank. A page holds `page_size` tokens of every page group of that pool."""
PoolId = NewType("PoolId", int)
"""Index of a retention in `CacheSpec.pools`. Groups of equal retention share page ids and hence one pool."""
RowId = NewType("RowId", int)
"""A running request's line in the page table."""
StepIndex = NewType("StepIndex", int)
RegionId = NewType("RegionId", int)

Boot = NewType("Boot", int)
"""64-bit number of one process start, or change of role; later ones of a name are higher. What is known of a peer dies
with it."""
PeerName = NewType("PeerName", str)
"""Name of an instance, unique in the cluster: `prefill-0`, `decode-1`, `front`."""
Room = NewType("Room", bytes)
"""16 random bytes, minted by the front, one per sample: pairs the prefill and the decode half of a request."""
Attempt = NewType("Attempt", int)
"""One try within a room, minted by decode, counted from 1."""
TicketSeq = NewType("TicketSeq", int)
"""Number of a ticket, contiguous per (decode boot, prefill boot), counted from 1."""
Namespace = NewType("Namespace", str)
"""Tenant (plus optional salts, see namespaces.py). First element of every cache key: two namespaces never share a
page."""
DEFAULT_NAMESPACE = Namespace("default")
"""That of requests without a key."""


class Role(Enum):
    """What an instance does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    FRONT = "front"
