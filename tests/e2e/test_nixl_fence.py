"""The promise that memory safety rests on: after D's fence of a peer, not one byte of that peer changes D's memory.

Real processes over UCX tcp. P's large writes are broken off in their middle, D destroys its endpoint, and D's memory is
watched from then on; another writer's transfer is under way all the time and must not notice. The same scenes without
the fence show that the bytes were really waiting. What cannot be fenced says so.
"""

from collections.abc import Callable, Iterator

import pytest

from deltaserve.transports.nixl.options import NixlOptions
from tests.transports.puppets import NIXL_OPTIONS, POLLING_ONLY, Puppet, Troupe, join

WINDOW = 32 << 20
OF_P = 2 * WINDOW
"""P writes below; the other writer's window is above."""
ARENA = 3 * WINDOW
OTHERS_VALUE = 200
OPTIONS = pytest.mark.parametrize("options", [NIXL_OPTIONS, POLLING_ONLY], ids=["thread", "polling"])
"""With the progress thread bytes land at any moment; without it they wait in the kernel until D polls."""
SHARED_MEMORY = NixlOptions("posix,cma,tcp,self", "lo")


@pytest.fixture(scope="module")
def troupe() -> Iterator[Troupe]:
    made = Troupe(ARENA)
    yield made
    made.dismiss()


def writing_prefill(troupe: Troupe, d: Puppet, value: int) -> tuple[Puppet, list[int]]:
    """P in the middle of two windows of D's memory, its connection's buffers grown; and its writes."""
    p = troupe.call("p")
    join(p, d)
    warm = p.do("write", peer="d", offset=0, num_bytes=WINDOW, pieces=4)
    d.start("listen", count=1)
    assert p.do("finish", write=warm) == "done"
    assert d.answer() == ["landed 0"]
    p.do("fill", value=value)
    return p, [p.do("write", peer="d", offset=i * WINDOW, num_bytes=WINDOW, pieces=4) for i in range(2)]


def late_bytes(d: Puppet) -> int:
    """Bytes that change in D's memory from now on until it stands still, D polling as it always does."""
    d.do("snapshot")
    return int(d.do("settle", polls=True, end=OF_P))


# ---------------------------------------------------------------- how writes are broken off


def kill(p: Puppet, writes: list[int]) -> None:
    p.kill()


def stop(p: Puppet, writes: list[int]) -> None:
    p.stop()


def cut(p: Puppet, writes: list[int]) -> None:
    """Its connection breaks; P lives and knows."""
    assert p.do("cut") > 0
    assert [p.do("finish", write=write) for write in writes] == ["error"] * len(writes)


def dirty(p: Puppet, writes: list[int]) -> None:
    """P gives its writes up in flight, which cancels nothing, and says so: D must fence. The connection stands."""
    assert {p.do("raw_release", write=write) for write in writes} == {"nixl_status_t.NIXL_SUCCESS"}


def own_fence(p: Puppet, writes: list[int]) -> None:
    """P destroyed its own endpoint for D: that protects P's memory, not D's."""
    assert p.do("fence", peer="d") == "closed"


def in_the_end(p: Puppet, writes: list[int]) -> None:
    """Whoever was stopped goes on, and tries to finish what it began."""
    if p.is_alive:
        p.resume()
        p.do("finish", write=writes[-1])


Break = Callable[[Puppet, list[int]], None]
WAYS = pytest.mark.parametrize("break_off", [kill, stop, cut, dirty, own_fence])


@WAYS
def test_without_the_fence_bytes_land_late(troupe: Troupe, break_off: Break) -> None:
    d = troupe.call("d", POLLING_ONLY)
    p, writes = writing_prefill(troupe, d, value=1)
    break_off(p, writes)
    assert late_bytes(d) > 0
    p.kill()


@OPTIONS
@WAYS
def test_nothing_lands_after_the_fence_and_the_other_writer_does_not_notice(
    troupe: Troupe, options: NixlOptions, break_off: Break
) -> None:
    d, other = troupe.call("d", options), troupe.call("other")
    join(other, d)
    other.do("fill", value=OTHERS_VALUE)
    p, writes = writing_prefill(troupe, d, value=1)
    undisturbed = other.do("write", peer="d", offset=OF_P, num_bytes=WINDOW, pieces=64)
    break_off(p, writes)
    assert d.do("fence", peer="p") == "closed"
    d.do("snapshot")
    d.start("listen", count=1)
    assert other.do("finish", write=undisturbed) == "done"
    assert d.answer() == [f"landed {OF_P}"]
    assert d.do("settle", polls=True, end=OF_P) == 0
    in_the_end(p, writes)
    assert d.do("settle", polls=True, end=OF_P) == 0
    assert d.do("notifications") == []
    assert d.do("count", value=OTHERS_VALUE) == WINDOW
    p.kill()


def test_memory_freed_by_the_fence_belongs_to_the_next_peer(troupe: Troupe) -> None:
    """What the fence is for: D hands the same pages to another writer at once, and only that one's bytes are there."""
    d = troupe.call("d")
    for turn in range(1, 3):
        following = troupe.call("following")
        join(following, d)
        dying, _ = writing_prefill(troupe, d, value=turn)
        dying.kill()
        assert d.do("fence", peer="p") == "closed"
        following.do("fill", value=100 + turn)
        write = following.do("write", peer="d", offset=0, num_bytes=ARENA, pieces=64)
        d.start("listen", count=1)
        assert following.do("finish", write=write) == "done"
        assert d.answer() == ["landed 0"]
        assert d.do("count", value=100 + turn) == ARENA
        d.do("settle", polls=True)
        assert d.do("count", value=100 + turn) == ARENA
        assert d.do("fence", peer="following") == "closed"


def test_a_reaped_writer_over_shared_memory_writes_nothing_more_but_it_is_no_fence(troupe: Troupe) -> None:
    """There P's own system calls move the bytes and end with it. The adapter cannot know that P was reaped, so it says
    that it cannot fence, and the pages stay quarantined."""
    d = troupe.call("d", SHARED_MEMORY)
    for _ in range(3):
        p = troupe.call("p", SHARED_MEMORY)
        join(p, d)
        p.start("flood", peer="d", num_bytes=WINDOW, pieces=4096, rounds=400)
        while d.do("count", value=0) == ARENA:
            pass
        p.kill()
        assert late_bytes(d) == 0
        assert [d.do("fence", peer="p") for _ in range(2)] == ["impossible"] * 2
        d.do("fill", value=0)
