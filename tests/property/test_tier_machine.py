"""Tier against a plain model: what is found is what was stored last, and a slot that is read keeps what it holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from deltaserve.control.cache.tier import Tier
from deltaserve.core.keys import KEY_BYTES

NUM_SLOTS = 5
KEYS = [bytes([number]) * KEY_BYTES for number in range(9)]
CHAINS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)


class TierMachine(RuleBasedStateMachine):
    """The model: slot |-> key that its bytes are of, as the copying side would leave them."""

    writes = Bundle("writes")
    reads = Bundle("reads")

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier(NUM_SLOTS)
        self.bytes: dict[int, bytes] = {}
        self.found: set[bytes] = set()
        """Keys that may be found."""
        self.writing: dict[int, bytes] = {}
        self.void: set[int] = set()
        """Slots whose write was begun before all was forgotten."""
        self.reading: list[tuple[int, ...]] = []

    @rule(key=st.sampled_from(KEYS), target=writes)
    def begin(self, key: bytes) -> int | None:
        before = set(self.found)
        slot = self.tier.begin(key)
        pinned = {slot for slots in self.reading for slot in slots}
        if slot is None:
            assert all(self.slot(one) in pinned for one in self.found)
            return None
        assert slot not in pinned
        assert slot not in self.writing
        evicted = {one for one in before if one not in self.tier}
        assert len(evicted) <= 1
        assert not evicted or len(before) + len(self.writing) + self.num_held() == NUM_SLOTS
        self.found -= evicted
        self.writing[slot] = key
        self.bytes[slot] = b"half written"
        return slot

    @rule(slot=consumes(writes), works=st.booleans())
    def end(self, slot: int | None, works: bool) -> None:
        if slot is None:
            return
        key = self.writing.pop(slot)
        if not works:
            self.tier.failed(slot)
        else:
            self.bytes[slot] = key
            self.tier.stored(slot)
            if slot not in self.void:
                self.found.add(key)
        self.void.discard(slot)

    @rule(chain=CHAINS, target=reads)
    def read(self, chain: list[bytes]) -> tuple[int, ...]:
        keys, known = b"".join(chain), [key in self.found for key in chain]
        num_found = self.tier.num_from(keys, 0)
        assert num_found == (known.index(False) if False in known else len(known))
        missing = self.tier.last_missing(keys, range(len(chain)))
        assert missing == max((at for at, is_known in enumerate(known) if not is_known), default=None)
        slots = self.tier.use(keys, range(num_found))
        assert [self.bytes[slot] for slot in slots] == chain[: len(slots)]
        slots = tuple(dict.fromkeys(slots))
        self.tier.pin(slots)
        self.reading.append(slots)
        return slots

    @rule(slots=consumes(reads))
    def end_read(self, slots: tuple[int, ...]) -> None:
        self.tier.unpin(slots)
        self.reading.remove(slots)

    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=3))
    def forget(self, keys: set[bytes]) -> None:
        self.tier.forget(keys)
        self.found -= keys

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.found)))
        self.tier.touch(key)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.found.clear()
        self.void |= set(self.writing)

    def slot(self, key: bytes) -> int:
        (slot,) = self.tier.use(key, range(1))
        return slot

    def num_held(self) -> int:
        """Slots that are read although nobody finds them any more."""
        pinned = {slot for slots in self.reading for slot in slots}
        return len(pinned - {self.slot(key) for key in self.found if key in self.tier})

    @invariant()
    def books_agree(self) -> None:
        self.tier.check_integrity()
        assert {key for key in KEYS if key in self.tier} == self.found
        assert len(self.tier) == len(self.found)
        assert self.tier.num_writing == len(self.writing)
        assert self.tier.num_pinned == len({slot for slots in self.reading for slot in slots})


TierMachine.TestCase.settings = settings(stateful_step_count=40)
TestTier = TierMachine.TestCase
