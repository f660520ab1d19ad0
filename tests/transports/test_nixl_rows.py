"""How NIXL really behaves, row by row, in real processes: the ground on which the adapter and the protocol stand.

A row asserts what was measured, also where the library is surprising: a new version that behaves otherwise must be
noticed here, not in production. P writes, D is written to. Measured with nixl 1.5.1, UCX tcp over loopback:

| event | what happens |
|---|---|
| D does not poll, no progress thread | nothing lands; P reads PENDING; all of it lands once D polls |
| D has a progress thread | lands and reads DONE without D ever polling |
| notification | leaves P only when P polls (or in the post, if the write ends there), although the bytes are there |
| DONE at P | all bytes visible at D, 12 of 12 windows |
| P killed and reaped, then D polls | megabytes land after P's death |
| connection cut | P reads ERROR; megabytes land afterwards |
| P releases the handle, forgets the peer, or fences in flight | the call succeeds; megabytes land afterwards |
| D deregisters its memory, or forgets the peer | not a fence: a new write lands in full, DONE |
| D destroys its agent for P | 0 bytes afterwards; other peers undisturbed; P reads ERROR |
| shared memory (cma) and a live P, same fence | megabytes land afterwards: the adapter says IMPOSSIBLE |
| D killed | P reads ERROR; the next write is refused or reads ERROR |
| D stopped | P reads PENDING without end; DONE after D goes on |
| process ends without `close`, mid-write | the adapter's atexit closes the agents: exit code 0 |
| idle progress thread | under 5 % of a core at a delay of 10 ms |
| listeners | only 127.0.0.1 with UCX_NET_DEVICES=lo |
"""

from collections.abc import Iterator

import pytest

from deltaserve.transports.nixl.options import NixlOptions
from tests.transports.puppets import NIXL_OPTIONS, POLLING_ONLY, Puppet, Troupe, join

MIB = 1 << 20
WINDOW = 32 * MIB
NUM_WINDOWS = 2
ARENA = NUM_WINDOWS * WINDOW


@pytest.fixture(scope="module")
def troupe() -> Iterator[Troupe]:
    made = Troupe(ARENA)
    yield made
    made.dismiss()


def joined(troupe: Troupe, reader_options: NixlOptions = NIXL_OPTIONS) -> tuple[Puppet, Puppet]:
    """P full of ones and an empty D, connected and warm."""
    writer, reader = troupe.call("p"), troupe.call("d", reader_options)
    join(writer, reader)
    widen(writer, reader)
    writer.do("fill", value=1)
    reader.do("fill", value=0)
    reader.do("snapshot")
    return writer, reader


def widen(writer: Puppet, reader: Puppet) -> None:
    """One large write: the kernel grows the connection's buffers, in which late bytes will wait."""
    write = writer.do("write", peer=reader.name, offset=0, num_bytes=WINDOW, pieces=4)
    reader.start("listen", count=1)
    assert writer.do("finish", write=write) == "done"
    assert reader.answer() == ["landed 0"]


def post_windows(writer: Puppet, peer: str = "d") -> list[int]:
    """Two windows in flight, of large pieces: UCX gives the kernel about two pieces at a time."""
    return [writer.do("write", peer=peer, offset=i * WINDOW, num_bytes=WINDOW, pieces=4) for i in range(NUM_WINDOWS)]


def test_nothing_lands_at_a_reader_that_does_not_poll(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    writes = post_windows(p)
    for _ in range(20):
        assert [p.do("poll", write=write) for write in writes] == ["pending"] * NUM_WINDOWS
        assert d.do("num_changed") == 0
    d.start("listen", count=NUM_WINDOWS)
    assert [p.do("finish", write=write) for write in writes] == ["done"] * NUM_WINDOWS
    assert sorted(d.answer()) == ["landed 0", f"landed {WINDOW}"]
    assert d.do("count", value=1) == ARENA


def test_progress_thread_lands_bytes_without_polling(troupe: Troupe) -> None:
    p, d = joined(troupe)
    assert [p.do("finish", write=write) for write in post_windows(p)] == ["done"] * NUM_WINDOWS
    assert d.do("count", value=1) == ARENA


def test_notification_leaves_only_when_the_writer_polls(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)  # with a thread at D a write may end inside the post, which counts as a poll
    write = p.do("write", peer="d", offset=0, num_bytes=MIB)
    while d.do("count", value=1) < MIB:
        assert d.do("listen", count=1, give_up_s=0.01) == []
    assert d.do("listen", count=1, give_up_s=0.3) == []
    assert p.do("finish", write=write) == "done"
    assert d.do("listen", count=1) == ["landed 0"]


def test_done_means_visible(troupe: Troupe) -> None:
    p, d = joined(troupe)
    for value in range(1, 13):
        p.do("fill", value=value)
        write = p.do("write", peer="d", offset=0, num_bytes=WINDOW, pieces=64)
        assert p.do("finish", write=write) == "done"
        assert d.do("count", value=value) == WINDOW


def test_bytes_land_after_the_death_of_their_writer(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    post_windows(p)
    p.kill()
    assert d.do("num_changed") == 0
    assert 0 < d.do("settle", polls=True) < ARENA


def test_bytes_land_after_the_connection_was_cut(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    writes = post_windows(p)
    assert p.do("cut") > 0
    assert [p.do("finish", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    assert d.do("num_changed") == 0
    assert 0 < d.do("settle", polls=True) < ARENA


def test_releasing_a_handle_cancels_nothing(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    for write in post_windows(p):
        assert p.do("raw_release", write=write) == "nixl_status_t.NIXL_SUCCESS"
    assert d.do("settle", polls=True) == ARENA


def test_forgetting_the_reader_cancels_nothing_that_left(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    post_windows(p)
    assert p.do("raw_forget_peer", peer="d") == "nixl_status_t.NIXL_SUCCESS"
    assert d.do("num_changed") == 0
    assert d.do("settle", polls=True) > 0


def test_the_writer_s_fence_is_none_for_the_reader(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    writes = post_windows(p)
    assert p.do("fence", peer="d") == "closed"
    assert [p.do("poll", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    assert d.do("num_changed") == 0
    assert d.do("settle", polls=True) > 0


@pytest.mark.parametrize("attempt", ["raw_deregister", "raw_forget_peer"])
def test_deregistering_or_forgetting_is_no_fence(troupe: Troupe, attempt: str) -> None:
    p, d = joined(troupe)
    assert d.do(attempt, peer="p") == "nixl_status_t.NIXL_SUCCESS"
    assert [p.do("finish", write=write) for write in post_windows(p)] == ["done"] * NUM_WINDOWS
    assert d.do("count", value=1) == ARENA


@pytest.mark.parametrize("options", [NIXL_OPTIONS, POLLING_ONLY], ids=["thread", "polling"])
def test_destroying_the_reader_s_endpoint_is_the_fence(troupe: Troupe, options: NixlOptions) -> None:
    p, d = joined(troupe, options)
    other = troupe.call("other")
    join(other, d)
    writes = post_windows(p)
    assert d.do("fence", peer="p") == "closed"
    d.do("snapshot")
    assert p.do("finish", write=writes[-1]) != "pending"
    assert d.do("settle", polls=True) == 0
    other.do("fill", value=2)
    undisturbed = other.do("write", peer="d", offset=0, num_bytes=WINDOW)
    d.start("listen", count=1)
    assert other.do("finish", write=undisturbed) == "done"
    assert d.answer() == ["landed 0"]
    assert d.do("count", value=2) == WINDOW


def test_shared_memory_cannot_be_fenced_and_the_adapter_says_so(troupe: Troupe) -> None:
    """There the writer's own system call moves the bytes: one that has begun goes on, whatever the reader destroys.

    Whether a byte lands after the fence is chance (docs/safety.md has the measurement); that the adapter does not
    claim a fence is not.
    """
    options = NixlOptions("posix,cma,tcp,self", "lo")
    p, d = troupe.call("p", options), troupe.call("d", options)
    join(p, d)
    p.start("flood", peer="d", num_bytes=WINDOW, pieces=4096, rounds=40)
    while d.do("count", value=0) == ARENA:
        pass
    assert [d.do("fence", peer="p") for _ in range(2)] == ["impossible"] * 2
    p.answer()
    assert p.do("fence", peer="d") == "impossible"


def test_death_of_the_reader_is_an_error_not_an_exception(troupe: Troupe) -> None:
    p, d = joined(troupe, POLLING_ONLY)
    writes = post_windows(p)
    d.kill()
    assert [p.do("finish", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    late = p.do("write", peer="d", offset=0, num_bytes=MIB)
    assert late is None or p.do("finish", write=late) == "error"
    assert p.do("notifications") == []
    assert p.do("fence", peer="d") == "closed"


def test_stopped_reader_keeps_the_write_pending(troupe: Troupe) -> None:
    p, d = joined(troupe)
    d.stop()
    writes = post_windows(p)
    assert p.do("finish", write=writes[-1], give_up_s=1.0) == "pending"
    d.resume()
    assert [p.do("finish", write=write) for write in writes] == ["done"] * NUM_WINDOWS


def test_writer_may_fence_a_stopped_reader(troupe: Troupe) -> None:
    p, d = joined(troupe)
    d.stop()
    writes = post_windows(p)
    assert p.do("fence", peer="d") == "closed"
    assert [p.do("poll", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    d.resume()
    assert d.do("notifications") == []


def test_process_that_forgot_to_close_still_exits_with_zero(troupe: Troupe) -> None:
    p, d = joined(troupe)
    post_windows(p)
    assert p.exit_code() == 0
    assert d.exit_code() == 0


def test_closed_process_exits_with_zero(troupe: Troupe) -> None:
    p, d = joined(troupe)
    for side in (p, d):
        side.do("close")
        assert side.exit_code() == 0


def test_restarted_peer_comes_back_under_its_name(troupe: Troupe) -> None:
    d = troupe.call("d")
    for turn in range(1, 4):
        p = troupe.call("p")
        join(p, d)
        p.do("fill", value=turn)
        assert p.do("finish", write=p.do("write", peer="d", offset=0, num_bytes=MIB)) == "done"
        assert d.do("listen", count=1) == ["landed 0"]
        assert d.do("count", value=turn) == MIB
        p.kill()
        assert d.do("fence", peer="p") == "closed"


def test_idle_progress_thread_costs_little(troupe: Troupe) -> None:
    _, d = joined(troupe)
    assert any(d.do("cpu_while_idle", seconds=1.0) < 0.05 for _ in range(10)), "more in each of several seconds"


def test_it_listens_on_this_host_only(troupe: Troupe) -> None:
    p, d = joined(troupe)
    for side in (p, d):
        assert set(side.do("listeners")) == {"0100007F"}
