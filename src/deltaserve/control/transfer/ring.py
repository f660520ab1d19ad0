"""A reader's staging memory: a ring of bytes, handed out as leases and taken back in any order.

A lease is written by the peers it was told to, read by the scatter, and given back by its owner: after the scatter, or
when its ticket ends (a failed ticket's lease stays until nothing of it can land any more, as its pages do).

    round 3    |####....####  |     leases are cut one behind the other; one that does not fit before the end of the
    round 4    |##              |   ring starts at offset 0 of the next round, and the tail stays empty
                      ^ mark        the oldest lease that lives; nothing behind it reaches a full round further

So two leases that live never share a byte, and of the marks (round, offset) each is at least the one before. A lease
below the mark is over: a peer that was told the mark must not write by it any more.

Who finds no room waits. Later ones that fit pass it, until it has waited half of its patience; then nobody does. At
the end of its patience it is given up, with a reason in words: nothing waits for ever, and nothing in silence. An ask
that is repeated changes nothing. Time is handed in.

A lease of a peer that cannot be fenced is lost: bytes may come by it for ever. Nothing is cut behind it further than
one round, so after that much use the ring is used up, and who asks is refused at once instead of waiting in vain.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from deltaserve.core.errors import DeltaserveError, IntegrityError, StateError
from deltaserve.core.sizes import size, sizes_apart

ALIGNMENT = 256
"""Leases start and end at multiples of this: whole elements of every dtype, and what a device copies well."""

_SETTING = "--staging-memory-mib"
"""What a user raises to have a larger ring."""

Owner = TypeVar("Owner", bound=Hashable)


class StagingTooSmall(DeltaserveError):
    """What was asked for does not fit the ring, or what is left of it: no waiting helps. The message says why."""


class RingPosition(NamedTuple):
    """A place in the life of a ring; later ones compare greater."""

    round: int
    offset: int


class RingLease(NamedTuple):
    """Bytes [offset, offset + num_bytes) of the ring, in its `round`-th use. No two leases are equal."""

    round: int
    offset: int
    num_bytes: int

    @property
    def start(self) -> RingPosition:
        return RingPosition(self.round, self.offset)


class WaitOver(NamedTuple, Generic[Owner]):
    """A wait that was too long."""

    owner: Owner
    reason: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_bytes: int
    since: float


class StagingRing(Generic[Owner]):
    """Leases of one ring, each under the name of its owner: a lease has one owner, an owner at most one lease."""

    def __init__(self, num_bytes: int, patience_s: float) -> None:
        """Raises ValueError for sizes that are not aligned."""
        if num_bytes <= 0 or num_bytes % ALIGNMENT:
            raise ValueError(f"a ring of {num_bytes} bytes: expected a multiple of {ALIGNMENT}")
        self.num_bytes = num_bytes
        self._patience_s = patience_s
        self._live: dict[Owner, RingLease] = {}
        self._ranges: deque[RingLease] = deque()
        """Leases in order of their positions: those that live, and those given back before an older one."""
        self._returned: set[RingLease] = set()
        """Leases in `_ranges` that were given back."""
        self._waiting: OrderedDict[Owner, _Waiting] = OrderedDict()
        self._lost: RingLease | None = None
        """The oldest lease that will never be given back."""
        self._head = RingPosition(0, 0)
        """Where the next lease starts, if it fits before the end."""

    # ------------------------------------------------------------ asking

    def ask(self, owner: Owner, num_bytes: int, now: float) -> RingLease | None:
        """A lease, or None: the owner waits, and `admit` will name it. Raises StagingTooSmall.

        An owner that asks again gets what it has, or goes on waiting.
        """
        if owner in self._live:
            return self._live[owner]
        if owner in self._waiting:
            return None
        needed = _aligned(num_bytes)
        if needed > self.num_bytes:
            asked, held = sizes_apart(needed, self.num_bytes)
            raise StagingTooSmall(f"{asked} do not fit the staging ring of {held}: raise {_SETTING} to as much")
        if self._is_hopeless(needed):
            raise StagingTooSmall(self._why_hopeless(needed))
        lease = None if self._is_barred(now) else self._cut(owner, needed)
        if lease is None:
            self._waiting[owner] = _Waiting(needed, now)
        return lease

    def take(self, owner: Owner, num_bytes: int) -> RingLease | None:
        """A lease if there is room now and nobody waits for any; else nothing happens."""
        is_known = owner in self._live or owner in self._waiting
        return None if is_known or self._waiting else self._cut(owner, _aligned(num_bytes))

    def admit(self, now: float) -> list[tuple[Owner, RingLease]]:
        """Leases for those of the waiting that fit now, the longest waiting first."""
        admitted = []
        for owner, wait in list(self._waiting.items()):
            lease = self._cut(owner, wait.num_bytes)
            if lease is not None:
                del self._waiting[owner]
                admitted.append((owner, lease))
            elif self._is_impatient(wait, now):
                break
        return admitted

    def give_up(self, now: float) -> list[WaitOver[Owner]]:
        """End the waits that took too long or wait for nothing, and say what was in the way. To be called before
        `admit`'s next turn."""
        late = [(owner, w) for owner, w in self._waiting.items() if self._is_over(w, now)]
        for owner, _ in late:
            del self._waiting[owner]
        return [WaitOver(owner, self._reason(wait, now)) for owner, wait in late]

    def _is_barred(self, now: float) -> bool:
        """Somebody has waited so long that nobody passes any more."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and self._is_impatient(first, now)

    def _is_impatient(self, wait: _Waiting, now: float) -> bool:
        return now >= wait.since + self._patience_s / 2

    def _is_over(self, wait: _Waiting, now: float) -> bool:
        return now >= wait.since + self._patience_s or self._is_hopeless(wait.num_bytes)

    def _is_hopeless(self, num_bytes: int) -> bool:
        """Even when all that can be given back is: the head never moves back, nor do leases that are lost."""
        return self._lost is not None and self._reaches_into(self._next(num_bytes), self._lost)

    def _why_hopeless(self, num_bytes: int) -> str:
        return (
            f"no {size(num_bytes)} are left of the staging ring: a peer that cannot be fenced may write there for ever"
        )

    def _reason(self, wait: _Waiting, now: float) -> str:
        if self._is_hopeless(wait.num_bytes):
            return self._why_hopeless(wait.num_bytes)
        return (
            f"waited {now - wait.since:.1f} s for {size(wait.num_bytes)} of the staging ring of "
            f"{size(self.num_bytes)}: {len(self._live)} leases hold {size(self.num_leased_bytes)} of it; "
            f"raise {_SETTING}"
        )

    def _cut(self, owner: Owner, num_bytes: int) -> RingLease | None:
        lease = self._next(num_bytes)
        if num_bytes > self.num_bytes or (self._ranges and self._reaches_into(lease, self._ranges[0])):
            return None
        self._ranges.append(lease)
        self._live[owner] = lease
        self._head = RingPosition(lease.round, lease.offset + num_bytes)
        return lease

    def _next(self, num_bytes: int) -> RingLease:
        """What would be cut now."""
        start = self._head
        if start.offset + num_bytes > self.num_bytes:
            start = RingPosition(start.round + 1, 0)
        return RingLease(start.round, start.offset, num_bytes)

    def _reaches_into(self, lease: RingLease, older: RingLease) -> bool:
        return self._span(lease)[1] > self._span(older)[0] + self.num_bytes

    # ------------------------------------------------------------ giving back

    def give_back(self, owner: Owner) -> None:
        """The owner's lease is over, or its wait. Raises StateError if it has neither: each is given back once."""
        if self._waiting.pop(owner, None) is not None:
            return
        lease = self._live.pop(owner, None)
        if lease is None:
            raise StateError(f"staging ring: {owner!r} has no lease, and waits for none")
        self._returned.add(lease)
        while self._ranges and self._ranges[0] in self._returned:
            self._returned.discard(self._ranges.popleft())

    def lose(self, owner: Owner) -> None:
        """The owner's lease will never be given back. Raises StateError if it has none."""
        lease = self._live.get(owner)
        if lease is None:
            raise StateError(f"staging ring: {owner!r} has no lease to lose")
        self._lost = min(lease, self._lost or lease)

    # ------------------------------------------------------------ views

    @property
    def mark(self) -> RingPosition:
        """Position of the oldest lease that lives; without one, where the last one ended. Never moves back."""
        return self._ranges[0].start if self._ranges else self._head

    def lease_of(self, owner: Owner) -> RingLease | None:
        return self._live.get(owner)

    def is_waiting(self, owner: Owner) -> bool:
        return owner in self._waiting

    def __iter__(self) -> Iterator[Owner]:
        """Owners of leases that live."""
        return iter(list(self._live))

    def waiting(self) -> list[Owner]:
        """Owners of no lease that wait for one, in order."""
        return list(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leased_bytes(self) -> int:
        return sum(lease.num_bytes for lease in self._live.values())

    def check_integrity(self) -> None:
        """I15: ranges are disjoint and in order, and the oldest lease lives."""
        if self._ranges and self._ranges[0] in self._returned:
            raise IntegrityError("staging ring: the oldest lease was given back and is kept")
        if sorted([*self._live.values(), *self._returned]) != list(self._ranges):
            raise IntegrityError("staging ring: a lease has no range, or a range no lease")
        if self._live.keys() & self._waiting.keys():
            raise IntegrityError("staging ring: an owner has a lease and waits for one")
        spans = [self._span(lease) for lease in self._ranges]
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise IntegrityError("staging ring: leases overlap")
        if spans and spans[-1][1] > spans[0][0] + self.num_bytes:
            raise IntegrityError("staging ring: the youngest lease reaches into the oldest")

    def _span(self, lease: RingLease) -> tuple[int, int]:
        """Counted from the ring's first use on."""
        start = lease.round * self.num_bytes + lease.offset
        return start, start + lease.num_bytes


def _aligned(num_bytes: int) -> int:
    """The bytes rounded up to whole units, one at least: a lease has a place."""
    return max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
