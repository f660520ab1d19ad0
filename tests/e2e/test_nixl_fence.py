"""The promise that memory safety rests on: after D's fence of a peer, not one byte of that peer changes D's memory.

Real processes over UCX tcp. P is killed or stopped in the middle of large writes, D destroys its endpoint, and D's
memory is watched from then on. The same scene without the fence shows that the bytes were really waiting.
"""

from collections.abc import Iterator

import pytest

from deltaserve.transport.nixl import NixlOptions
from tests.transport.puppets import POLLING_ONLY, Puppet, Troupe, join
from tests.transport.worlds import NIXL_OPTIONS

WINDOW = 32 << 20
ARENA = 2 * WINDOW
OPTIONS = pytest.mark.parametrize("options", [NIXL_OPTIONS, POLLING_ONLY], ids=["thread", "polling"])
"""With the progress thread bytes land at any moment; without it they wait in the kernel until D polls."""


@pytest.fixture(scope="module")
def troupe() -> Iterator[Troupe]:
    made = Troupe(ARENA)
    yield made
    made.dismiss()


def writing_prefill(troupe: Troupe, d: Puppet, value: int) -> tuple[Puppet, int]:
    """P in the middle of two windows over all of D's memory, its connection's buffers grown; and the later write."""
    p = troupe.call("p")
    join(p, d)
    warm = p.do("write", peer="d", offset=0, num_bytes=WINDOW, pieces=4)
    d.start("listen", count=1)
    assert p.do("finish", write=warm) == "done"
    assert d.answer() == ["landed 0"]
    p.do("fill", value=value)
    writes = [p.do("write", peer="d", offset=i * WINDOW, num_bytes=WINDOW, pieces=4) for i in range(2)]
    return p, writes[-1]


def late_bytes(d: Puppet) -> int:
    """Bytes that change in D's memory from now on until it stands still, D polling as it always does."""
    d.do("snapshot")
    return int(d.do("settle", polls=True))


def test_without_the_fence_a_dead_writer_s_bytes_land(troupe: Troupe) -> None:
    d = troupe.call("d", POLLING_ONLY)
    p, _ = writing_prefill(troupe, d, value=1)
    p.kill()
    assert late_bytes(d) > 0


@OPTIONS
def test_killed_writer_changes_nothing_after_the_fence(troupe: Troupe, options: NixlOptions) -> None:
    d = troupe.call("d", options)
    for turn in range(1, 4):
        p, _ = writing_prefill(troupe, d, value=turn)
        p.kill()
        assert d.do("fence", peer="p") == "closed"
        assert late_bytes(d) == 0
        assert d.do("notifications") == []


@OPTIONS
def test_stopped_writer_changes_nothing_after_the_fence_even_when_it_goes_on(
    troupe: Troupe, options: NixlOptions
) -> None:
    d = troupe.call("d", options)
    p, last_write = writing_prefill(troupe, d, value=1)
    p.stop()
    assert d.do("fence", peer="p") == "closed"
    assert late_bytes(d) == 0
    p.resume()
    assert p.do("finish", write=last_write) != "pending"
    assert d.do("settle", polls=True) == 0


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
