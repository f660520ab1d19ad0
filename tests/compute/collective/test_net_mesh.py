"""Ranks on several machines, here all on loopback: the same bits as threads get, strangers stay out, errors in time."""

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deltaserve.compute.collective import net_handshake
from deltaserve.compute.collective.collective import Collective, ProcessCollective
from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.net_handshake import RankAdmission, RankIdentity
from deltaserve.compute.collective.net_meeting import NetMeeting, listen_for_ranks
from deltaserve.compute.collective.net_mesh import NetMesh
from deltaserve.compute.collective.rank_mesh import SLOT_BYTES
from deltaserve.core.layout.shard import Shard
from tests.compute.collective.collective_rank import try_all
from tests.compute.collective.test_collective import check_all, on_threads
from tests.patience import PATIENCE_S

HOST = "127.0.0.1"
KEY = bytes(range(32))
HELLO_BYTES = len(RankIdentity(Shard(), (HOST, 1), KEY).hello())


def meeting_at(listener: socket.socket, key: bytes = KEY) -> NetMeeting:
    return NetMeeting(HOST, listener.getsockname()[1], HOST, key)


def meet(size: int) -> list[NetMesh]:
    listener = listen_for_ranks(HOST)
    meeting = meeting_at(listener)

    def join(rank: int) -> NetMesh:
        return NetMesh.join(Shard(rank, size), meeting, PATIENCE_S, listener if rank == 0 else None)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def together(meshes: Sequence[NetMesh], work: Callable[[ProcessCollective], object]) -> list[object]:
    """What each rank returned, or the error it raised."""

    def guarded(mesh: NetMesh) -> object:
        try:
            return work(ProcessCollective(mesh))
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(meshes)) as threads:
        return list(threads.map(guarded, meshes))


class Meeting:
    """A meeting that goes on: its rank 0 waits, and others join in threads."""

    def __init__(self, size: int, threads: ThreadPoolExecutor) -> None:
        self.size = size
        self._threads = threads
        listener = listen_for_ranks(HOST)
        self.meeting = meeting_at(listener)
        self.first = threads.submit(NetMesh.join, Shard(0, size), self.meeting, PATIENCE_S, listener)

    def join(self, shard: Shard, key: bytes = KEY, listener: socket.socket | None = None) -> Future[NetMesh]:
        meeting = replace(self.meeting, key=key)
        return self._threads.submit(NetMesh.join, shard, meeting, PATIENCE_S, listener)

    def check_it_ends_well(self) -> None:
        """With the rank that has not come yet, of a meeting of two."""
        second = self.join(Shard(1, 2))
        check_sum([self.first.result(), second.result()])


def check_sum(meshes: Sequence[NetMesh]) -> None:
    sums = together(meshes, lambda collective: collective.all_reduce(torch.ones(3)))
    assert all(isinstance(each, Tensor) and each.tolist() == [len(meshes)] * 3 for each in sums), sums


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def strangers() -> Iterator[Callable[[int, bytes], socket.socket]]:
    """Opens connections to a port, sends something, and keeps them open."""
    with ExitStack() as stack:

        def connect(port: int, sent: bytes) -> socket.socket:
            stranger = stack.enter_context(socket.create_connection((HOST, port), PATIENCE_S))
            if sent:
                stranger.sendall(sent)
            return stranger

        yield connect


def ends(stranger: socket.socket) -> bool:
    """Whether the other side closes the connection; waits for it."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_bits_as_between_threads(size: int) -> None:
    meshes = meet(size)
    assert [mesh.shard for mesh in meshes] == [Shard(rank, size) for rank in range(size)]
    over_net, on_one = together(meshes, try_all), on_threads(size, PATIENCE_S, try_all)
    check_all([results for results in over_net if isinstance(results, dict)])
    for got, expected in zip(over_net, on_one, strict=True):
        assert isinstance(got, dict) and isinstance(expected, dict)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


LENGTHS = (0, 1, 7, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1, 3 * SLOT_BYTES // 4 + 13)
"""Numbers of 4 bytes; the last are several pieces."""


@pytest.mark.parametrize("size", [2, 3])
def test_every_length(size: int) -> None:
    """Long ones do not fit what the kernel keeps: all send and receive at once."""

    def work(collective: Collective) -> list[Tensor]:
        results = []
        for dtype in (torch.float32, torch.int64, torch.uint8):
            for length in LENGTHS:
                seed = torch.Generator().manual_seed(collective.shard.rank)
                part = (torch.randn(length, generator=seed) * 50).to(dtype)
                results += [collective.all_reduce(part.clone()), collective.all_gather(part)]
        return results

    for got, expected in zip(together(meet(size), work), on_threads(size, PATIENCE_S, work), strict=True):
        assert isinstance(got, list) and isinstance(expected, list)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_large_parts_both_ways_many_times() -> None:
    """Ranks drift apart by an exchange: what one sends ahead is not taken for a part of this one."""

    def work(collective: Collective) -> bool:
        ones = torch.ones(3 * SLOT_BYTES // 8, dtype=torch.int64)
        return all(torch.equal(collective.all_reduce(ones * turn), ones * (3 * turn)) for turn in range(10))

    assert together(meet(3), work) == [True] * 3


def test_a_part_may_be_made_of_what_the_last_exchange_gave() -> None:
    def work(mesh: NetMesh) -> list[list[int]]:
        first = mesh.exchange(torch.tensor([mesh.shard.rank, 5], dtype=torch.uint8))
        return [list(row) for row in mesh.exchange(first[1 - mesh.shard.rank]).tolist()]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, meet(2))) == [[[1, 5], [0, 5]]] * 2


def test_rank_0_listens_where_the_meeting_says(threads: ThreadPoolExecutor) -> None:
    """Without a listener of the caller, and after the others began to dial."""
    with listen_for_ranks(HOST) as listener:
        meeting = meeting_at(listener)
    later = threads.submit(NetMesh.join, Shard(1, 2), meeting, PATIENCE_S)
    check_sum([NetMesh.join(Shard(0, 2), meeting, PATIENCE_S), later.result()])


def test_one_rank_alone() -> None:
    (mesh,) = meet(1)
    assert mesh.exchange(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [[1, 2]]


def test_joining_as_a_collective(threads: ThreadPoolExecutor) -> None:
    listener = listen_for_ranks(HOST)
    meeting = meeting_at(listener)
    first = threads.submit(ProcessCollective.join_over, Shard(0, 2), meeting, PATIENCE_S, listener)
    second = threads.submit(ProcessCollective.join_over, Shard(1, 2), meeting, PATIENCE_S)
    results = [threads.submit(each.result().all_gather, torch.ones(1)) for each in (first, second)]
    assert [result.result().tolist() for result in results] == [[1, 1], [1, 1]]
    assert listener.fileno() < 0, "closed once all have met"


# ---------------------------------------------------------------- who is kept out


def test_a_short_key_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        NetMeeting(HOST, 1, HOST, b"short")
    assert "x07" not in repr(NetMeeting(HOST, 1, HOST, KEY))


def test_a_rank_with_another_key_is_kept_out(threads: ThreadPoolExecutor) -> None:
    meeting = Meeting(2, threads)
    with pytest.raises(CollectiveError, match="rank 0 refuses rank 1: it holds another key"):
        meeting.join(Shard(1, 2), bytes(32)).result()
    meeting.check_it_ends_well()


def test_a_rank_of_a_group_of_another_size_is_kept_out(threads: ThreadPoolExecutor) -> None:
    meeting = Meeting(2, threads)
    with pytest.raises(CollectiveError, match="rank 0 is one of 2 ranks, rank 1 one of 3"):
        meeting.join(Shard(1, 3)).result()
    meeting.check_it_ends_well()


@pytest.mark.parametrize("rank", [0, 2, 2**32 - 1])
def test_a_rank_that_there_is_not_is_kept_out(threads: ThreadPoolExecutor, rank: int) -> None:
    """All that it says is true but the rank."""
    meeting = Meeting(2, threads)
    identity = RankIdentity(Shard(rank, 2), (HOST, 1), KEY)
    with pytest.raises(CollectiveError, match="refuses rank"):
        net_handshake.dial(identity, 0, (HOST, meeting.meeting.port), time.monotonic() + PATIENCE_S)
    meeting.check_it_ends_well()


def test_the_same_rank_twice(threads: ThreadPoolExecutor) -> None:
    """One of them is in, the other one hears that it is not."""
    meeting = Meeting(3, threads)
    both = [meeting.join(Shard(1, 3)) for _ in range(2)]
    while not any(each.done() for each in both):
        with pytest.raises(TimeoutError):
            meeting.first.result(0.02)
    refused = next(each for each in both if each.done())
    with pytest.raises(CollectiveError, match="has a rank 1 already"):
        refused.result()
    last = meeting.join(Shard(2, 3))
    check_sum([each.result() for each in (meeting.first, *both, last) if each is not refused])


def hello(rank: int, size: int) -> bytes:
    return RankIdentity(Shard(rank, size), (HOST, 1), KEY).hello()


SAID = {
    "nothing": b"",
    "less than a hello": b"DSR1" + bytes(10),
    "garbage": b"GET / HTTP/1.1\r\nHost: nobody\r\nConnection: close\r\n\r\n" + b"x" * 100,
    "huge numbers": b"DSR1" + b"\xff" * 96,
    "no proof": hello(1, 2),
    "a wrong proof": hello(1, 2) + bytes(32),
    "a proof and more than that": hello(1, 2) + bytes(100_000),
    "another size without a proof": hello(1, 3) + bytes(32),
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_stranger_neither_ends_nor_holds_up_the_meeting(
    threads: ThreadPoolExecutor, strangers: Callable[[int, bytes], socket.socket], said: bytes
) -> None:
    """At rank 0, and at another one. It keeps its connection open until all have met."""
    meeting, listener = Meeting(3, threads), listen_for_ranks(HOST)
    at_both = [strangers(port, said) for port in (meeting.meeting.port, listener.getsockname()[1])]
    if len(said) >= HELLO_BYTES + 32:
        assert ends(at_both[0])
    others = [meeting.join(Shard(1, 3), KEY, listener), meeting.join(Shard(2, 3))]
    check_sum([meeting.first.result(), *(other.result() for other in others)])
    assert all(ends(stranger) for stranger in at_both)


def test_what_was_said_on_another_connection_proves_nothing(
    threads: ThreadPoolExecutor, strangers: Callable[[int, bytes], socket.socket]
) -> None:
    """A stranger repeats what a rank of this very start has said."""
    heard = []
    with listen_for_ranks(HOST) as between:
        dialling = threads.submit(NetMesh.join, Shard(1, 2), meeting_at(between), PATIENCE_S)
        connection, _ = between.accept()
        with connection:
            heard.append(connection.recv(HELLO_BYTES))
            connection.sendall(hello(0, 2))
            heard.append(connection.recv(32))
    with pytest.raises(CollectiveError, match="refuses rank 1"):
        dialling.result()
    meeting = Meeting(2, threads)
    stranger = strangers(meeting.meeting.port, heard[0])
    assert len(stranger.recv(HELLO_BYTES)) == HELLO_BYTES
    stranger.sendall(heard[1])
    assert ends(stranger)
    meeting.check_it_ends_well()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (hello(0, 2) + bytes(32), "does not hold the key"),
        (hello(0, 3), "rank 0 is one of 3 ranks, rank 1 one of 2"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(HELLO_BYTES), "what listens as rank 0 is no rank"),
    ],
    ids=["a wrong proof", "another size", "no rank"],
)
def test_a_stranger_that_listens_is_not_taken_for_rank_0(threads: ThreadPoolExecutor, said: bytes, error: str) -> None:
    with listen_for_ranks(HOST) as listener:
        dialling = threads.submit(NetMesh.join, Shard(1, 2), meeting_at(listener), PATIENCE_S)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(said)
            with suppress(OSError):  # it has ended the connection already
                connection.shutdown(socket.SHUT_WR)
            assert ends(connection)
        with pytest.raises(CollectiveError, match=error):
            dialling.result()


def test_a_rank_is_not_taken_for_another_one(threads: ThreadPoolExecutor) -> None:
    """Which holds the key, too: addresses that were mixed up. The other one has accepted nobody."""
    meeting = Meeting(3, threads)
    identity = RankIdentity(Shard(2, 3), (HOST, 1), KEY)
    with pytest.raises(CollectiveError, match="what listens as rank 1 is rank 0"):
        net_handshake.dial(identity, 1, (HOST, meeting.meeting.port), time.monotonic() + PATIENCE_S)
    others = [meeting.join(Shard(rank, 3)) for rank in (1, 2)]
    check_sum([meeting.first.result(), *(other.result() for other in others)])


def test_one_that_says_nothing_is_dropped_after_a_while(
    threads: ThreadPoolExecutor,
    strangers: Callable[[int, bytes], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(net_handshake, "PROOF_LIMIT_S", 0.1)
        meeting = Meeting(2, threads)
        assert all(ends(strangers(meeting.meeting.port, said)) for said in (b"", hello(1, 2)))
    meeting.check_it_ends_well()


def test_many_strangers_are_heard_in_turn(
    threads: ThreadPoolExecutor,
    strangers: Callable[[int, bytes], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes while all places are taken waits for one."""
    monkeypatch.setattr(net_handshake, "MAX_CANDIDATES", 2)
    monkeypatch.setattr(net_handshake, "PROOF_LIMIT_S", PATIENCE_S)
    meeting = Meeting(2, threads)
    silent = [strangers(meeting.meeting.port, b"") for _ in range(5)]
    other = meeting.join(Shard(1, 2))
    for stranger in silent[:3]:
        stranger.close()
        assert not other.done()
    silent[3].close()
    check_sum([meeting.first.result(), other.result()])


# ---------------------------------------------------------------- errors in time


def test_a_meeting_that_not_all_come_to(threads: ThreadPoolExecutor) -> None:
    listener = listen_for_ranks(HOST)
    first = threads.submit(NetMesh.join, Shard(0, 4), meeting_at(listener), 0.5, listener)
    with pytest.raises(CollectiveError, match=r"not all of them met within 0\.5 s: ranks 1, 2, 3 are missing$"):
        first.result()
    assert listener.fileno() < 0


def test_a_meeting_tells_whom_it_refused() -> None:
    listener = listen_for_ranks(HOST)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"x" * HELLO_BYTES)
        with pytest.raises(CollectiveError, match="rank 1 is missing; refused last: one that is no rank"):
            NetMesh.join(Shard(0, 2), meeting_at(listener), 0.5, listener)


def test_a_meeting_without_rank_0() -> None:
    """It is there and does not accept; then it is not there any more."""
    with listen_for_ranks(HOST) as listener:
        meeting = meeting_at(listener)
        with pytest.raises(CollectiveError, match=r"within 0\.5 s: rank 0 is missing: it does not answer"):
            NetMesh.join(Shard(1, 2), meeting, 0.5)
    with pytest.raises(CollectiveError, match=r"within 0\.5 s: rank 0 is missing: Connection refused"):
        NetMesh.join(Shard(1, 2), meeting, 0.5)


def test_a_rank_that_left_may_come_again(threads: ThreadPoolExecutor) -> None:
    """As long as not all are there."""
    meeting = Meeting(3, threads)
    with pytest.raises(CollectiveError, match=r"within 0\.5 s: rank 0 "):
        NetMesh.join(Shard(1, 3), meeting.meeting, 0.5)
    others = [meeting.join(Shard(rank, 3)) for rank in (1, 2)]
    check_sum([meeting.first.result(), *(other.result() for other in others)])


def admitting(listener: socket.socket, size: int) -> RankAdmission:
    """A rank 0 that the test makes act."""
    own = RankIdentity(Shard(0, size), listener.getsockname(), KEY)
    return RankAdmission(own, listener, time.monotonic() + PATIENCE_S)


def test_a_rank_hears_at_once_that_rank_0_has_ended(threads: ThreadPoolExecutor) -> None:
    """Before it has told where the others are, and afterwards."""
    for told, error in ((b"", "rank 0 has not found all others"), (bytes(12), "rank 0 has ended")):
        with listen_for_ranks(HOST) as listener:
            second = threads.submit(NetMesh.join, Shard(1, 3), meeting_at(listener), PATIENCE_S)
            admission = admitting(listener, 3)
            admission.admit([1])
            admission.met[1].sendall(told)
            admission.met[1].close()
            with pytest.raises(CollectiveError, match=error):
                second.result()


def test_rank_0_tells_who_left(threads: ThreadPoolExecutor) -> None:
    with listen_for_ranks(HOST) as listener:
        identity = RankIdentity(Shard(1, 3), (HOST, 1), KEY)
        address, deadline = listener.getsockname(), time.monotonic() + PATIENCE_S
        dialling = threads.submit(net_handshake.dial, identity, 0, address, deadline)
        admission = admitting(listener, 3)
        admission.admit([1])
        dialling.result().close()
        admission._deadline = time.monotonic() + 0.2
        with pytest.raises(TimeoutError, match="ranks 1, 2 are missing; rank 1 came and left"):
            admission.admit([1, 2])


def test_one_that_does_not_take_part_is_not_waited_for_for_ever() -> None:
    """As a stopped one. Whoever gave up is out of step for good: the other one hears of it."""
    first, second = meet(2)
    first.limit(0.2)
    with pytest.raises(CollectiveError, match="one did not come in time"):
        first.exchange(torch.zeros(SLOT_BYTES, dtype=torch.uint8))
    with pytest.raises(CollectiveError, match="one is gone"):
        first.exchange(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(CollectiveError):
        second.exchange(torch.zeros(SLOT_BYTES, dtype=torch.uint8))


@pytest.mark.parametrize("num_bytes", [1, SLOT_BYTES])
def test_one_that_has_ended_is_missed_at_once(num_bytes: int) -> None:
    meshes = meet(3)
    check_sum(meshes)
    del meshes[1]
    gc.collect()
    results = together(meshes, lambda collective: collective.all_reduce(torch.ones(num_bytes, dtype=torch.uint8)))
    assert any(str(result).startswith("ranks: one is gone") for result in results)
    assert all(isinstance(result, CollectiveError) for result in results)


def test_one_that_ends_in_the_middle_of_an_exchange(threads: ThreadPoolExecutor) -> None:
    *meshes, last = meet(3)
    results = threads.submit(together, meshes, lambda collective: collective.all_reduce(torch.ones(SLOT_BYTES // 4)))
    for other in last._others.values():
        other.setblocking(True)
        other.sendall((1).to_bytes(8, "little") + SLOT_BYTES.to_bytes(8, "little") + bytes(1000))
    assert not results.done()
    last._close()
    assert all("ranks: one is gone" in str(result) for result in results.result())


def test_ranks_that_do_not_compute_the_same() -> None:
    """Lengths differ, or one has computed something more."""
    for num_more in (0, 1):
        first, second = meet(2)
        second._number += num_more

        def work(collective: Collective, more: int = num_more) -> Tensor:
            return collective.all_reduce(torch.ones(2 + (1 - more) * collective.shard.rank))

        results = together((first, second), work)
        assert any(str(result) == "ranks: they do not compute the same" for result in results)
        assert all(isinstance(result, CollectiveError) for result in results)


def test_a_header_with_a_huge_length_is_not_believed() -> None:
    first, second = meet(2)
    (to_first,) = second._others.values()
    to_first.send((1).to_bytes(8, "little") + b"\xff" * 8 + os.urandom(1000))
    with pytest.raises(CollectiveError, match="they do not compute the same"):
        first.exchange(torch.zeros(4, dtype=torch.uint8))
