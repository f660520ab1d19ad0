"""Copies between polls: cut into slices, loads before stores, and a failure ends one copy only."""

from deltaserve.control.transfer.commands import (
    LoadPages,
    PagesCopied,
    SlotCopy,
    StagingUsed,
    StorePages,
    TransferCommand,
    TransferReport,
)
from deltaserve.control.transfer.ranks import RankGroup
from deltaserve.control.transfer.slot_seal import HEADER_BYTES, SlotSeal
from deltaserve.control.transfer.tier_plane import TierError, TierPlane
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.keys import KEY_BYTES

KEY = b"k" * KEY_BYTES


class Quiet:
    """A plane with something to say at every poll."""

    def __init__(self) -> None:
        self.num_polls = 0

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        return []

    def poll(self, now: float) -> list[TransferReport]:
        self.num_polls += 1
        return [StagingUsed(())]

    def is_idle(self) -> bool:
        return True

    def expect(self, is_active: bool, now: float) -> None: ...

    def close(self) -> None: ...


class Slots:
    """Moves ten bytes a page."""

    def __init__(self, broken: int | None = None) -> None:
        self.moved: list[tuple[str, int]] = []
        self.broken = broken
        self.is_closed = False

    def write(self, copy: SlotCopy) -> int:
        return self._move("write", copy.slot)

    def read(self, copy: SlotCopy) -> int:
        return self._move("read", copy.slot)

    def _move(self, what: str, slot: int) -> int:
        if slot == self.broken:
            raise TierError("broken")
        self.moved.append((what, slot))
        return 10

    def close(self) -> None:
        self.is_closed = True


def load(number: int, *slots: int) -> LoadPages:
    return LoadPages(number, copies(slots))


def store(number: int, *slots: int) -> StorePages:
    return StorePages(number, copies(slots))


def copies(slots: tuple[int, ...]) -> tuple[SlotCopy, ...]:
    return tuple(SlotCopy(PoolId(0), PageId(slot), slot, KEY) for slot in slots)


def copied(plane: TierPlane) -> list[TransferReport]:
    return [report for report in plane.poll(0.0) if not isinstance(report, StagingUsed)]


def test_a_long_load_is_cut_and_the_transport_is_polled_between() -> None:
    slots, quiet = Slots(), Quiet()
    ticks = iter(range(100))
    plane = TierPlane(quiet, slots, lambda: float(next(ticks)), slice_bytes=20)
    assert plane.is_idle()
    plane.perform(store(1, 25), 0.0)
    plane.perform(load(2, *range(20)), 0.0)
    assert not plane.is_idle()
    assert copied(plane) == []
    assert (len(slots.moved), quiet.num_polls) == (16, 8)
    assert copied(plane) == [PagesCopied(2, 20, 200, 20.0)]
    assert copied(plane) == [PagesCopied(1, 1, 10, 1.0)]
    assert slots.moved == [*(("read", slot) for slot in range(20)), ("write", 25)]
    assert plane.is_idle()
    plane.close()
    assert slots.is_closed


def test_stores_take_one_slice_at_a_time() -> None:
    slots = Slots()
    plane = TierPlane(Quiet(), slots, lambda: 0.0, slice_bytes=20)
    plane.perform(store(1, 0, 1, 2), 0.0)
    assert copied(plane) == []
    assert len(slots.moved) == 2
    assert copied(plane) == [PagesCopied(1, 3, 30, 0.0)]


def test_a_failure_says_how_much_is_good_and_ends_that_copy_only() -> None:
    plane = TierPlane(Quiet(), Slots(broken=1), lambda: 0.0)
    for command in (load(1, 0, 1, 2), load(2, 4), store(3, 0, 1), store(4, 4)):
        plane.perform(command, 0.0)
    assert copied(plane) == [
        PagesCopied(1, 1, 10, 0.0, "broken"),
        PagesCopied(2, 1, 10, 0.0),
        PagesCopied(3, 1, 10, 0.0, "broken"),
        PagesCopied(4, 1, 10, 0.0),
    ]


def test_of_several_ranks_the_one_with_the_fewest_good_pages_counts() -> None:
    group = RankGroup(2)
    assert list(group.fan_out(load(1, 0, 1))) == [load(1, 0, 1)] * 2
    assert group.num_pending == 1
    assert group.reduce(0, PagesCopied(1, 2, 20, 1.0)) == []
    assert group.reduce(1, PagesCopied(1, 1, 10, 3.0, "broken")) == [PagesCopied(1, 1, 30, 3.0, "broken")]
    group.fan_out(store(2, 0))
    assert group.reduce(1, PagesCopied(2, 1, 10, 0.0)) == []
    assert group.reduce(0, PagesCopied(2, 0, 0, 0.0, "full")) == [PagesCopied(2, 0, 10, 0.0, "full")]
    assert group.num_pending == 0
    assert group.reduce(0, PagesCopied(2, 1, 10, 0.0)) == []


def test_a_slot_is_believed_only_for_its_own_page_and_whole() -> None:
    seal, parts = SlotSeal("model rank 0"), [memoryview(b"keys of a page"), memoryview(b"and values")]
    header = seal.header(KEY, parts)
    assert len(header) == HEADER_BYTES
    assert seal.is_whole(header, KEY, parts)
    assert not seal.is_whole(header, b"o" * KEY_BYTES, parts)
    assert not seal.is_whole(header, KEY, [parts[0], memoryview(b"and valueS")])
    assert not seal.is_whole(header, KEY, parts[:1])
    assert not seal.is_whole(bytes(HEADER_BYTES), KEY, parts)
    assert not SlotSeal("model rank 1").is_whole(header, KEY, parts)
