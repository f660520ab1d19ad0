"""A worker of several rank processes around a small control plane: they compute together, and end together."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deltaserve.process.children.exits import Exit
from deltaserve.process.links.links import Links
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.process.worker.server import running, wait_until, wait_until_gone
from tests.process.worker.test_worker import supervised
from tests.process.worker.workers import NO_FILES, Front, Worker, working


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def ranks_of(worker: Worker) -> list[int]:
    """Process ids of ranks 1 and following, once all are there."""
    worker.port()
    return [int(found) for found in re.findall(r"rank process (\d+)", worker.log())]


def test_every_rank_computes_every_step(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, tp_size=3) as worker:
        front = Front(links, worker.port())
        for token in (5, 6, 7):
            front.submit(token)
        assert [front.answer() for _ in range(3)] == [(6,), (7,), (8,)]
        assert [worker.log().count(f"computes step {step}") for step in (1, 2, 3)] == [2, 2, 2]
        pids = ranks_of(worker)
        assert len(pids) == 2
        worker.signal(signal.SIGTERM)
        assert worker.code() == Exit.OK
        for pid in pids:
            wait_until_gone(pid)


def test_a_worker_listens_once_all_of_its_ranks_have_loaded(tmp_path: Path) -> None:
    """Who probes the port, as Kubernetes does, takes it for ready then."""
    with working(tmp_path, "rank-looks", tp_size=2, port=free_port()) as worker:
        worker.port()
        assert "the worker listens already" not in worker.log()


def test_lines_of_a_rank_name_it(tmp_path: Path) -> None:
    with working(tmp_path, tp_size=2) as worker:
        worker.wait_for_log("decode-0 rank 1 INFO ")


def test_a_stop_signal_is_for_rank_0_alone(tmp_path: Path, links: Links) -> None:
    """A service manager may send it to all processes at once: the ranks are needed to drain."""
    with working(tmp_path, "step-is-slow", tp_size=2) as worker:
        front = Front(links, worker.port())
        [pid] = ranks_of(worker)
        front.submit(5)
        front.submit(6)
        front.answer()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            psutil.Process(pid).send_signal(number)
        worker.signal(signal.SIGTERM)
        assert front.answer() == (7,)
        assert worker.code() == Exit.OK


def test_a_killed_rank_ends_the_worker_which_says_which_and_how(tmp_path: Path) -> None:
    with working(tmp_path, tp_size=3) as worker:
        killed, other = ranks_of(worker)
        psutil.Process(killed).kill()
        assert worker.code() == Exit.RANK_ENDED
        assert re.search(rf"rank [12] \(process {killed}\) ended with signal SIGKILL", worker.log())
        wait_until_gone(other)


def test_a_stopped_rank_is_told_of_and_left_alone(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, tp_size=2) as worker:
        front = Front(links, worker.port())
        [pid] = ranks_of(worker)
        psutil.Process(pid).suspend()
        worker.wait_for_log(f"rank 1: process {pid} is stopped, by a signal or a debugger; `kill -CONT {pid}`")
        front.submit(5)
        psutil.Process(pid).resume()
        worker.wait_for_log("rank 1: goes on")
        assert front.answer() == (6,)


def test_ranks_end_with_a_rank_0_that_is_killed(tmp_path: Path) -> None:
    with working(tmp_path, tp_size=3) as worker:
        pids = ranks_of(worker)
        worker.signal(signal.SIGKILL)
        for pid in pids:
            wait_until_gone(pid)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("rank-step-raises", "ended with exit code 70"),
        ("rank-step-fails", "ended with exit code 74"),
    ],
)
def test_a_step_that_fails_on_one_rank_ends_the_worker(tmp_path: Path, links: Links, model: str, words: str) -> None:
    with working(tmp_path, model, tp_size=2) as worker:
        Front(links, worker.port()).submit(5)
        assert worker.code() == Exit.RANK_ENDED
        assert re.search(rf"rank 1 \(process \d+\) {words}", worker.log())


def test_a_step_that_fails_on_rank_0_ends_the_worker(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "step-dies", tp_size=2) as worker:
        Front(links, worker.port()).submit(5)
        assert worker.code() == Exit.THREAD_DIED
        assert "the device is lost" in worker.log()


def test_a_rank_that_does_not_end_its_step_ends_the_worker(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "rank-step-hangs", tp_size=2, step_stuck_after_s=0.5) as worker:
        Front(links, worker.port()).submit(5)
        assert worker.code() in (Exit.RANK_ENDED, Exit.STUCK)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("rank-refuses", "deltaserve: rank 1: device cuda:1 asked for, but torch sees no CUDA device"),
        ("rank-transport-refuses", "deltaserve: rank 1: no such network device"),
        ("rank-transport-lacks-files", f"deltaserve: rank 1: {NO_FILES}"),
    ],
)
def test_what_a_rank_refuses_the_worker_refuses_in_one_line(tmp_path: Path, model: str, line: str) -> None:
    with working(tmp_path, model, tp_size=2) as worker:
        assert worker.code() == Exit.CONFIG
        assert line in worker.log().splitlines()
        assert "Traceback" not in worker.log()


def test_a_rank_that_dies_while_it_starts_ends_the_worker(tmp_path: Path) -> None:
    with working(tmp_path, "rank-dies-early", tp_size=2) as worker:
        assert worker.code() == Exit.RANK_ENDED
        assert "ended with exit code 9" in worker.log()


# ---------------------------------------------------------------- under a supervisor


def test_a_worker_one_of_whose_ranks_was_killed_comes_back_whole(tmp_path: Path, links: Links) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0", tp_size=2)]) as server:
        url = server.wait_for("IsReady")["url"]
        front = Front(links, int(url.rpartition(":")[2]))
        front.submit(5)
        assert front.answer() == (6,)
        [rank] = psutil.Process(server.pid("decode-0")).children()
        rank.kill()
        ended = server.wait_for("Ended")
        assert ended["code"] == Exit.RANK_ENDED
        assert any("signal SIGKILL" in line for line in ended["tail"])
        assert server.wait_for("IsReady")["url"] == url
        assert len(psutil.Process(server.pid("decode-0")).children()) == 1
        front.submit(7)
        assert front.answer() == (8,)
        assert server.end() == 0


def test_what_a_rank_refuses_is_the_last_word_of_the_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0", model="rank-refuses", tp_size=2)]) as server:
        reason = server.wait_for("GivenUp")["reason"]
        assert reason == "decode-0: rank 1: device cuda:1 asked for, but torch sees no CUDA device"
        assert server.process.wait(PATIENCE_S) == Exit.CONFIG


def test_ranks_end_with_the_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0", tp_size=2)]) as server:
        server.wait_for("IsReady")
        [rank] = psutil.Process(server.pid("decode-0")).children()
        server.process.kill()
        wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
