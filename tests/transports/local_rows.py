"""How the local transport behaves between real processes, row by row: the same events as in test_nixl_rows.py. Each row
is a check over a fresh scene; the memory may be of the host or of a GPU.

| event | what happens |
|---|---|
| D does not poll | nothing lands; P reads PENDING; all of it lands once D polls |
| DONE at P | all bytes visible at D |
| P killed, then D polls | D copies what it was asked for: P's memory stands still, and lives while D has mapped it |
| P stopped | D copies and hears all the same; P reads DONE after it goes on |
| P fences, also while D is stopped, and writes over its pages | D hears nothing of it |
| D fences | 0 bytes afterwards; other peers undisturbed; P reads ERROR |
| D killed | P reads ERROR; the next write is refused |
| D stopped | P reads PENDING without end; DONE after D goes on |
| process ends without `close` | exit code 0 |
| listeners | none on any network |
"""

from collections.abc import Callable
from pathlib import Path

from tests.transports.puppets import LocalOptions, Puppet, Troupe

MIB = 1 << 20
WINDOW = 32 * MIB
NUM_WINDOWS = 2
ARENA = NUM_WINDOWS * WINDOW


class LocalTroupe:
    """Puppets that meet in one folder."""

    def __init__(self, folder: Path, memory: str) -> None:
        """`memory`: see children/puppet_memory.py."""
        self._options = LocalOptions(folder, memory)
        self._troupe = Troupe(ARENA)

    def call(self, name: str) -> Puppet:
        return self._troupe.call(name, self._options)

    def dismiss(self) -> None:
        self._troupe.dismiss()


def join(a: Puppet, b: Puppet) -> None:
    of_a, of_b = a.do("open", peer=b.name), b.do("open", peer=a.name)
    a.do("attach", peer=b.name, other=of_b)
    b.do("attach", peer=a.name, other=of_a)


def joined(troupe: LocalTroupe) -> tuple[Puppet, Puppet]:
    """P full of ones and an empty D, connected."""
    writer, reader = troupe.call("p"), troupe.call("d")
    join(writer, reader)
    writer.do("fill", value=1)
    return writer, reader


def post_windows(writer: Puppet, pieces: int = 512) -> list[int]:
    """Two windows in flight."""
    return [
        writer.do("write", peer="d", offset=i * WINDOW, num_bytes=WINDOW, pieces=pieces) for i in range(NUM_WINDOWS)
    ]


def in_flight(writer: Puppet, reader: Puppet) -> list[int]:
    """Two windows, of which the reader has copied a part of the first."""
    writes = post_windows(writer)
    while not reader.do("num_changed"):
        assert reader.do("notifications") == []
    assert reader.do("num_changed") < WINDOW
    return writes


def nothing_lands_at_a_reader_that_does_not_poll(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    writes = post_windows(p)
    for _ in range(20):
        assert [p.do("poll", write=write) for write in writes] == ["pending"] * NUM_WINDOWS
        assert d.do("num_changed") == 0
    assert d.do("listen", count=NUM_WINDOWS) == ["landed 0", f"landed {WINDOW}"]
    assert [p.do("finish", write=write) for write in writes] == ["done"] * NUM_WINDOWS
    assert d.do("count", value=1) == ARENA


def done_means_visible(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    for value in range(1, 13):
        p.do("fill", value=value)
        write = p.do("write", peer="d", offset=0, num_bytes=WINDOW, pieces=64)
        d.start("listen", count=1)
        assert p.do("finish", write=write) == "done"
        assert d.answer() == ["landed 0"]
        assert d.do("count", value=value) == WINDOW


def memory_of_a_killed_writer_stands_still(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    in_flight(p, d)
    p.kill()
    assert d.do("listen", count=1) == ["landed 0"]
    assert d.do("count", value=1) == WINDOW
    assert d.do("fence", peer="p") == "closed"


def a_reader_s_fence_ends_what_a_killed_writer_asked_for(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    in_flight(p, d)
    p.kill()
    assert d.do("fence", peer="p") == "closed"
    d.do("snapshot")
    assert d.do("settle", polls=True) == 0
    assert d.do("notifications") == []


def a_stopped_writer_keeps_nobody_from_copying_or_fencing(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    writes = in_flight(p, d)
    p.stop()
    assert d.do("listen", count=NUM_WINDOWS) == ["landed 0", f"landed {WINDOW}"]
    assert d.do("count", value=1) == ARENA
    p.resume()
    assert [p.do("finish", write=write) for write in writes] == ["done"] * NUM_WINDOWS
    p.do("fill", value=3)
    post_windows(p)
    p.stop()
    assert d.do("fence", peer="p") == "closed"
    d.do("snapshot")
    p.resume()
    assert d.do("settle", polls=True) == 0


def what_a_reader_copied_after_the_writer_s_fence_is_thrown_away(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    writes = in_flight(p, d)
    assert p.do("fence", peer="d") == "closed"
    assert [p.do("poll", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    p.do("fill", value=9)
    assert d.do("listen", count=1, give_up_s=0.3) == []


def writer_may_fence_a_stopped_reader(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    writes = in_flight(p, d)
    d.stop()
    assert p.do("fence", peer="d") == "closed"
    assert [p.do("poll", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    p.do("fill", value=9)
    d.resume()
    assert d.do("listen", count=1, give_up_s=0.3) == []


def a_fence_amid_the_copy_of_a_reader_that_runs(troupe: LocalTroupe) -> None:
    """Wherever the fence hits: what is heard are windows of the old bytes, whole."""
    p, d = joined(troupe)
    for _ in range(10):
        p.do("fill", value=1)
        post_windows(p, pieces=4096)
        d.start("listen", count=NUM_WINDOWS, give_up_s=0.1)
        p.do("fence", peer="d")
        p.do("fill", value=9)
        for heard in d.answer():
            assert d.do("count", value=1) >= WINDOW, heard
        d.do("reset")
        join(p, d)


def the_reader_s_fence_leaves_other_writers_alone(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    other = troupe.call("other")
    join(other, d)
    writes = in_flight(p, d)
    assert d.do("fence", peer="p") == "closed"
    d.do("snapshot")
    assert p.do("finish", write=writes[-1]) == "error"
    assert d.do("settle", polls=True) == 0
    other.do("fill", value=2)
    undisturbed = other.do("write", peer="d", offset=0, num_bytes=WINDOW)
    assert d.do("listen", count=1) == ["landed 0"]
    assert other.do("finish", write=undisturbed) == "done"
    assert d.do("count", value=2) == WINDOW


def death_of_the_reader_is_an_error_not_an_exception(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    writes = in_flight(p, d)
    d.kill()
    assert [p.do("finish", write=write) for write in writes] == ["error"] * NUM_WINDOWS
    assert p.do("write", peer="d", offset=0, num_bytes=MIB) is None
    assert p.do("notifications") == []
    assert p.do("fence", peer="d") == "closed"


def stopped_reader_keeps_the_write_pending_and_blocks_nobody(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    d.stop()
    writes = [write for _ in range(8) for write in post_windows(p, pieces=4096)]
    assert p.do("finish", write=writes[-1], give_up_s=0.5) == "pending"
    d.resume()
    d.start("listen", count=len(writes))
    assert [p.do("finish", write=write) for write in writes] == ["done"] * len(writes)
    assert len(d.answer()) == len(writes)


def process_that_forgot_to_close_still_exits_with_zero(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    in_flight(p, d)
    assert p.exit_code() == 0
    assert d.exit_code() == 0


def restarted_peer_comes_back_under_its_name(troupe: LocalTroupe) -> None:
    d = troupe.call("d")
    for turn in range(1, 4):
        p = troupe.call("p")
        join(p, d)
        p.do("fill", value=turn)
        write = p.do("write", peer="d", offset=0, num_bytes=MIB)
        assert d.do("listen", count=1) == ["landed 0"]
        assert p.do("finish", write=write) == "done"
        assert d.do("count", value=turn) == MIB
        p.kill()
        assert d.do("fence", peer="p") == "closed"


def it_listens_on_no_network(troupe: LocalTroupe) -> None:
    p, d = joined(troupe)
    for side in (p, d):
        assert side.do("listeners") == []


ROWS: tuple[Callable[[LocalTroupe], None], ...] = (
    nothing_lands_at_a_reader_that_does_not_poll,
    done_means_visible,
    memory_of_a_killed_writer_stands_still,
    a_reader_s_fence_ends_what_a_killed_writer_asked_for,
    a_stopped_writer_keeps_nobody_from_copying_or_fencing,
    what_a_reader_copied_after_the_writer_s_fence_is_thrown_away,
    writer_may_fence_a_stopped_reader,
    a_fence_amid_the_copy_of_a_reader_that_runs,
    the_reader_s_fence_leaves_other_writers_alone,
    death_of_the_reader_is_an_error_not_an_exception,
    stopped_reader_keeps_the_write_pending_and_blocks_nobody,
    process_that_forgot_to_close_still_exits_with_zero,
    restarted_peer_comes_back_under_its_name,
    it_listens_on_no_network,
)
