"""StagingRing against a map of its bytes, under random asks, returns and waits (I15). `make test-full`: 1e5 steps."""

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.control.transfer.ring import ALIGNMENT, RingLease, RingPosition, StagingRing, StagingTooSmall
from deltaserve.core.errors import StateError

RING_WAIT_S = 8.0
OWNERS = st.integers(0, 9)


class RingMachine(RuleBasedStateMachine):
    """The model: which owner has each unit of the ring, and since when the others wait."""

    @initialize(units=st.integers(1, 12))
    def start(self, units: int) -> None:
        self.ring: StagingRing[int] = StagingRing(units * ALIGNMENT, RING_WAIT_S)
        self.units: list[int | None] = [None] * units
        self.waiting: dict[int, tuple[int, float]] = {}
        self.lost: set[int] = set()
        self.mark = self.ring.mark
        self.youngest = RingPosition(-1, 0)
        self.now = 0.0

    def take(self, owner: int, num_bytes: int, lease: RingLease) -> None:
        """Every byte of a lease was free; leases begin one after the other, never below the mark."""
        assert lease.num_bytes == -(-num_bytes // ALIGNMENT) * ALIGNMENT
        assert lease.offset % ALIGNMENT == 0
        assert lease.start > self.youngest
        assert lease.start >= self.ring.mark
        self.youngest = lease.start
        where = slice(lease.offset // ALIGNMENT, (lease.offset + lease.num_bytes) // ALIGNMENT)
        assert self.units[where] == [None] * (lease.num_bytes // ALIGNMENT)
        self.units[where] = [owner] * (lease.num_bytes // ALIGNMENT)

    def could_fit(self, num_bytes: int) -> bool:
        """Once all is given back that can be."""
        ring = deepcopy(self.ring)
        for owner in (*ring.waiting(), *ring):
            if owner not in self.lost:
                ring.give_back(owner)
        return ring.take(99, num_bytes) is not None

    @rule(owner=OWNERS, num_bytes=st.integers(1, 13 * ALIGNMENT))
    def ask(self, owner: int, num_bytes: int) -> None:
        known, is_waiting = self.ring.lease_of(owner), owner in self.waiting
        was_empty = not any(unit is not None for unit in self.units)
        try:
            lease = self.ring.ask(owner, num_bytes, self.now)
        except StagingTooSmall:
            assert known is None
            assert not is_waiting
            assert not self.could_fit(num_bytes)
            return
        if known is not None:
            assert lease == known
        elif is_waiting:
            assert lease is None
        elif lease is not None:
            assert all(self.now < since + RING_WAIT_S / 2 for _, since in self.waiting.values())
            self.take(owner, num_bytes, lease)
        else:
            assert not was_empty or self.waiting
            assert self.could_fit(num_bytes)
            self.waiting[owner] = (num_bytes, self.now)

    @rule(owner=OWNERS)
    def give_back(self, owner: int) -> None:
        if owner in self.waiting:
            self.ring.give_back(owner)
            del self.waiting[owner]
        elif owner in self.lost:
            return
        elif owner in self.units:
            self.ring.give_back(owner)
            self.units = [None if unit == owner else unit for unit in self.units]
        else:
            try:
                self.ring.give_back(owner)
            except StateError:
                return
            raise AssertionError("given back twice")

    @rule(owner=OWNERS, dice=st.integers(0, 3))
    def lose(self, owner: int, dice: int) -> None:
        if owner in self.units and dice == 0:
            self.ring.lose(owner)
            self.lost.add(owner)

    @rule()
    def admit(self) -> None:
        was_empty = not any(unit is not None for unit in self.units)
        admitted = self.ring.admit(self.now)
        for owner, lease in admitted:
            num_bytes, _ = self.waiting.pop(owner)
            self.take(owner, num_bytes, lease)
        assert admitted or not was_empty or not self.waiting
        assert self.ring.admit(self.now) == []

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule()
    def give_up(self) -> None:
        in_vain = {owner for owner, (num_bytes, _) in self.waiting.items() if not self.could_fit(num_bytes)}
        late = {owner for owner, (_, since) in self.waiting.items() if self.now >= since + RING_WAIT_S}
        given_up = self.ring.give_up(self.now)
        assert [over.owner for over in given_up] == [owner for owner in self.waiting if owner in late | in_vain]
        for over in given_up:
            assert ("cannot be fenced" if over.owner in in_vain else "--staging-memory") in over.reason
        for owner, _ in given_up:
            del self.waiting[owner]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.ring.check_integrity()
        assert set(self.ring) == {unit for unit in self.units if unit is not None}
        assert self.ring.num_leased_bytes == ALIGNMENT * sum(unit is not None for unit in self.units)
        assert {owner for owner in range(10) if self.ring.is_waiting(owner)} == self.waiting.keys()
        assert self.mark <= self.ring.mark
        self.mark = self.ring.mark

    def teardown(self) -> None:
        """Nothing is lost: given back in any order, the ring is whole again."""
        if not hasattr(self, "ring"):
            return
        for owner in list(self.waiting):
            self.ring.give_back(owner)
        for owner in set(self.ring) - self.lost:
            self.ring.give_back(owner)
        assert set(self.ring) == self.lost
        if not self.lost:
            assert self.ring.ask(99, self.ring.num_bytes, self.now) is not None


RingMachine.TestCase.settings = settings(stateful_step_count=50)
TestRing = RingMachine.TestCase
