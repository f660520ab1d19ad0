"""A worker whose ranks are on several machines, here with an echo for a model: who joins, who is turned away, and what
ends whom."""

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from deltaserve.core.layout.dtype import DType
from deltaserve.process.children.exits import Exit
from deltaserve.process.links.links import Links
from deltaserve.process.worker.worker_spec import RankNodes
from tests.ports import free_port
from tests.process.worker.server import PROGRAMS, wait_until_gone
from tests.process.worker.workers import ECHO, Front, Worker

NODE = (sys.executable, str(PROGRAMS / "echo_node.py"))


class Machines:
    """Nodes of one worker, each with a folder of its own; started anew they go on with its log."""

    def __init__(self, folder: Path, size: int = 2, ranks_each: int = 2) -> None:
        self._folder = folder
        self.size = size
        self.port = free_port()
        """Where node 0 is joined."""
        self._fields: dict[str, Any] = {"tp_size": size * ranks_each}
        self._started: list[Worker] = []

    def start(self, node: int, model: str = "echo", size: int | None = None, **changes: Any) -> Worker:
        folder = self._folder / f"node-{len(self._started)}"
        folder.mkdir()
        nodes = RankNodes(size=size or self.size, node=node, host="127.0.0.1", port=self.port, own_host="127.0.0.1")
        fields = {**self._fields, "nodes": nodes, **changes}
        worker = Worker(folder, model, NODE if node else ECHO, **fields)
        self._started.append(worker)
        return worker

    def kill(self) -> None:
        for worker in self._started:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            worker.process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def pids_of_ranks(*workers: Worker) -> list[int]:
    return [int(pid) for worker in workers for pid in re.findall(r"rank process (\d+)", worker.log())]


def test_ranks_of_all_machines_compute_every_step(machines: Machines, links: Links) -> None:
    """Whoever starts first waits for the others."""
    further = machines.start(1)
    further.wait_for_log("joins node 0 at 127.0.0.1")
    first = machines.start(0)
    front = Front(links, first.port())
    for token in (5, 6, 7):
        front.submit(token)
    assert [front.answer() for _ in range(3)] == [(6,), (7,), (8,)]
    assert [first.log().count(f"computes step {step}") for step in (1, 2, 3)] == [1, 1, 1]
    assert [further.log().count(f"computes step {step}") for step in (1, 2, 3)] == [2, 2, 2]
    assert "node 1: rank 2: loading" in first.log()
    pids = pids_of_ranks(first, further)
    assert len(pids) == 3
    first.signal(signal.SIGTERM)
    assert first.code() == Exit.OK
    for pid in pids:
        wait_until_gone(pid)
    further.wait_for_log("the ranks here have ended, and join anew")


def test_the_first_machine_waits_and_says_for_whom(tmp_path: Path) -> None:
    machines = Machines(tmp_path, size=3, ranks_each=1)
    try:
        first = machines.start(0)
        first.wait_for_log("for node 1, 2 of 3 (--node-rank)")
        machines.start(2)
        first.wait_for_log("node 2 has joined, from 127.0.0.1")
        machines.start(1)
        first.port()
    finally:
        machines.kill()


def test_after_a_death_of_rank_0_the_others_join_the_next_one(machines: Machines, links: Links) -> None:
    first, further = machines.start(0), machines.start(1)
    Front(links, first.port()).submit(5)
    pids = pids_of_ranks(first, further)
    first.process.kill()
    for pid in pids:
        wait_until_gone(pid)
    again = machines.start(0)
    with contextlib.closing(Links()) as others:
        front = Front(others, again.port())
        front.submit(6)
        assert front.answer() == (7,)
    assert further.process.poll() is None


def test_a_rank_killed_on_another_machine_ends_the_worker_which_says_which(machines: Machines) -> None:
    first, further = machines.start(0), machines.start(1)
    first.port()
    killed, other = pids_of_ranks(further)
    psutil.Process(killed).kill()
    assert first.code() == Exit.RANK_ENDED
    assert re.search(rf"node 1: rank [23] \(process {killed}\) ended with signal SIGKILL", first.log())
    wait_until_gone(other)
    machines.start(0).port()


def test_a_machine_whose_node_is_killed_ends_the_worker(machines: Machines) -> None:
    first, further = machines.start(0), machines.start(1)
    first.port()
    pids = pids_of_ranks(further)
    further.process.kill()
    for pid in pids:
        wait_until_gone(pid)
    assert first.code() == Exit.RANK_ENDED
    assert re.search(r"node 1 at 127\.0\.0\.1 is gone", first.log())


def test_a_node_that_is_killed_and_started_again_at_once_waits_for_the_next_rank_0(machines: Machines) -> None:
    """Its former life may not be missed yet: it is not taken for one too many."""
    first, further = machines.start(0), machines.start(1)
    first.port()
    further.process.kill()
    again = machines.start(1)
    assert first.code() == Exit.RANK_ENDED
    machines.start(0).port()
    assert again.process.poll() is None


@pytest.mark.parametrize("stopped", ["first", "further"])
def test_a_machine_that_is_silent_for_long_is_given_up(machines: Machines, stopped: str) -> None:
    first, further = machines.start(0), machines.start(1)
    first.port()
    pids = pids_of_ranks(further)
    silent = psutil.Process((first if stopped == "first" else further).process.pid)
    silent.suspend()
    try:
        if stopped == "first":
            further.wait_for_log("node 0 is gone: the ranks here have ended, and join anew")
            for pid in pids:
                wait_until_gone(pid)
        else:
            assert first.code() == Exit.RANK_ENDED
    finally:
        silent.resume()
    if stopped == "first":
        assert first.code() == Exit.RANK_ENDED
    machines.start(0).port()


def test_a_stop_signal_ends_a_further_node_at_once(machines: Machines) -> None:
    further = machines.start(1)
    further.wait_for_log("joins node 0")
    further.signal(signal.SIGTERM)
    assert further.code() == Exit.OK


# ---------------------------------------------------------------- who is turned away


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 32, "dtype": DType.BFLOAT16}, "dtype bfloat16, node 0 float32; page_size 32, node 0 16"),
        ({"size": 3}, "it is no further node of this worker|--nnodes 3, node 0 2"),
        ({"cache_dir": "cache", "max_running_requests": 2}, "max_running_requests 2, node 0 1; --cache-dir on one"),
    ],
)
def test_a_node_that_does_not_fit_is_turned_away_and_the_worker_waits_on(
    machines: Machines, changes: dict[str, Any], words: str
) -> None:
    first, misfit = machines.start(0), machines.start(1, **changes)
    assert misfit.code() == Exit.CONFIG
    assert re.search(f"node 0 turned this node away: .*({words})", misfit.log())
    assert "Traceback" not in misfit.log()
    assert re.search(f"a node at 127.0.0.1 was turned away: .*({words})", first.log())
    machines.start(1)
    first.port()


def test_of_two_processes_that_say_they_are_one_node_the_later_is_turned_away(machines: Machines, links: Links) -> None:
    first, _ = machines.start(0), machines.start(1)
    first.port()
    second = machines.start(1)
    assert second.code() == Exit.CONFIG
    assert "node 1 is there already, at 127.0.0.1" in second.log()
    front = Front(links, first.port())
    front.submit(5)
    assert front.answer() == (6,)


def test_who_has_another_key_never_joins(machines: Machines, tmp_path: Path) -> None:
    first = machines.start(0)
    first.wait_for_log("waiting at")
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_bytes(b"x" * 32)
    stranger = machines.start(1, secret_path=str(other))
    stranger.wait_for_log("joins node 0")
    machines.start(1)
    first.port()
    assert stranger.process.poll() is None


def test_what_strangers_say_changes_nothing(machines: Machines) -> None:
    """Bytes of no member's at the port where nodes join."""
    first = machines.start(0)
    first.wait_for_log("waiting at")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{machines.port}")
    socket.send(b"\x81\xa4type\xa4Join")
    machines.start(1)
    first.port()
    context.destroy(linger=0)


def test_there_are_as_many_pages_as_the_smallest_machine_has_room_for(machines: Machines) -> None:
    first, _ = machines.start(0), machines.start(1, num_pages=(3,))
    first.port()
    assert "ranks hold 3 pages, as many as the smallest machine has room for, not 4" in first.log()


@pytest.mark.parametrize(
    ("model", "line"),
    [("rank-refuses", "device cuda:"), ("rank-transport-refuses", "no such network device")],
)
def test_what_a_rank_refuses_every_node_tells(machines: Machines, model: str, line: str) -> None:
    first, further = machines.start(0), machines.start(1, model)
    for worker in (first, further):
        assert worker.code() == Exit.CONFIG
        assert line in worker.log()
        assert "Traceback" not in worker.log()
