"""A worker process: three real threads around a small control plane."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deltaserve.core.wire.messages import Finished
from deltaserve.launch.compose import free_port
from deltaserve.process.children.exits import Exit
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity
from deltaserve.settings.kv_events import KvEventsConfig
from tests.halting import losing_its_port
from tests.patience import PATIENCE_S
from tests.ports import taken
from tests.process.worker.server import running
from tests.process.worker.workers import ECHO, NO_FILES, SECRET, Front, Worker, working, write_worker


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def test_it_answers_and_ends_on_sigterm(tmp_path: Path, links: Links) -> None:
    with working(tmp_path) as worker:
        front = Front(links, worker.port())
        for token in (5, 6, 7):
            front.submit(token)
        assert [front.answer() for _ in range(3)] == [(6,), (7,), (8,)]
        worker.signal(signal.SIGTERM)
        assert worker.code() == Exit.OK
        assert "transport closed" in worker.log()


def test_it_finishes_what_it_has_before_it_ends(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "step-is-slow") as worker:
        front = Front(links, worker.port())
        front.submit(5)
        front.submit(6)
        front.answer()
        worker.signal(signal.SIGTERM)
        assert front.answer() == (7,)
        assert worker.code() == Exit.OK


def test_an_end_that_hangs_is_cut_short(tmp_path: Path) -> None:
    """Whoever starts workers again waits for each to end: one that nobody told to end is killed by nobody."""
    events = KvEventsConfig(endpoint=f"tcp://127.0.0.1:{free_port()}")
    with working(tmp_path, "end-hangs", kv_events=events) as worker:
        worker.port()
        worker.signal(signal.SIGTERM)
        assert worker.code() == Exit.STUCK
        assert "the process did not end, telling its last KV events went on for" in worker.log()
        assert "in _end" in worker.log()


def test_the_grace_bounds_the_drain(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "step-hangs", drain_grace_s=0.2) as worker:
        submit_and_wait(links, worker)
        worker.signal(signal.SIGTERM)
        assert worker.code() == Exit.OK
        assert "not drained" in worker.log()


def test_a_second_sigterm_ends_it_at_once(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "step-hangs", drain_grace_s=3600.0) as worker:
        submit_and_wait(links, worker)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGINT)
        assert worker.code() == Exit.OK


def submit_and_wait(links: Links, worker: Worker) -> None:
    """Until it is in the step that never ends."""
    Front(links, worker.port()).submit(5)
    worker.wait_for_log("the step hangs")


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("step-dies", Exit.THREAD_DIED, "the device is lost"),
        ("transfer-dies", Exit.THREAD_DIED, "the transport is gone"),
        ("loop-dies", Exit.FAILED, "something unforeseen"),
        ("loop-stops", Exit.STUCK, "in _on_frame"),
    ],
)
def test_a_dead_thread_ends_the_process_with_its_stack(
    tmp_path: Path, links: Links, model: str, code: Exit, words: str
) -> None:
    stuck_after_s = 3 if model == "loop-stops" else 600  # a loop that gets no time on a busy machine has not stopped
    with working(tmp_path, model, stuck_after_s=stuck_after_s) as worker:
        Front(links, worker.port()).submit(5)
        assert worker.code() == code
        assert words in worker.log()


def test_books_that_disagree_drain_the_worker(tmp_path: Path) -> None:
    with working(tmp_path, "books-disagree") as worker:
        assert worker.code() == Exit.INTEGRITY
        assert "one page too many" in worker.log()


def test_a_step_that_never_ends_ends_the_process_with_its_stack(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, "step-hangs", step_stuck_after_s=0.5) as worker:
        Front(links, worker.port()).submit(5)
        assert worker.code() == Exit.STUCK
        assert "a step did not end" in worker.log()
        assert "in execute" in worker.log()


def test_a_peer_whose_settings_differ_is_named_in_the_log(tmp_path: Path) -> None:
    with working(tmp_path, "peer-misfits") as worker:
        line = "WARNING no pages move between this worker and prefill-9: page_size: ours 16, theirs 64"
        worker.wait_for_log(line)


def test_pages_that_stay_in_quarantine_end_the_worker(tmp_path: Path) -> None:
    with working(tmp_path, "quarantine-stays") as worker:
        assert worker.code() == Exit.QUARANTINE
        assert "pages are in quarantine for 61 s" in worker.log()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("not-a-model", "deltaserve: config.json: not found in the model folder"),
        ("transport-refuses", "deltaserve: no such network device"),
        ("transport-lacks-files", f"deltaserve: {NO_FILES}"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(tmp_path: Path, model: str, line: str) -> None:
    with working(tmp_path, model) as worker:
        assert worker.code() == Exit.CONFIG
        assert line in worker.log().splitlines()
        assert "Traceback" not in worker.log()


def test_a_taken_port_is_a_wrong_configuration(tmp_path: Path) -> None:
    port = free_port()
    with taken(port), working(tmp_path, port=port) as worker:
        assert worker.code() == Exit.CONFIG
        assert f"127.0.0.1:{port}" in worker.log()


def test_a_spec_with_an_unknown_or_wrong_field_is_refused(tmp_path: Path) -> None:
    with working(tmp_path, page_size="large") as worker:
        assert worker.code() == Exit.CONFIG
        assert "page_size" in worker.log()


def test_links_with_keys_hear_members_only(tmp_path: Path, links: Links) -> None:
    with working(tmp_path, curve=True) as worker:
        member = Links(LinkSecurity.from_cluster_key(SECRET))
        Front(links, worker.port()).submit(9)
        front = Front(member, worker.port())
        front.submit(5)
        assert front.answer() == (6,)
        assert links.stats.received == 0
        member.close()


def test_an_idle_worker_uses_next_to_no_processor_time(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        worker.port()
        process = psutil.Process(worker.process.pid)

        def used_s() -> float:
            """Processor time in three seconds."""
            before = sum(process.cpu_times()[:2])
            time.sleep(3.0)
            return sum(process.cpu_times()[:2]) - before

        assert any(used_s() < 0.15 for _ in range(5)), "more in each of several spans"


# ---------------------------------------------------------------- under a supervisor


def supervised(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    spec = write_worker(folder, name=name, **changes)
    return {"name": name, "kind": "DECODE", "argv": [*ECHO, str(spec)]}


def test_a_killed_worker_comes_back_where_it_was_and_is_found_there(tmp_path: Path, links: Links) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0")]) as server:
        url = server.wait_for("IsReady")["url"]
        front = Front(links, _port(url))
        front.submit(5)
        assert front.answer() == (6,)
        psutil.Process(server.pid("decode-0")).kill()
        assert server.wait_for("IsReady")["url"] == url
        front.submit(7)
        assert front.answer() == (8,)
        assert server.end() == 0


def test_a_death_reaches_the_control_plane_of_the_others(tmp_path: Path, links: Links) -> None:
    children = [supervised(tmp_path, "decode-0"), supervised(tmp_path, "decode-1")]
    with running(tmp_path, children) as server:
        url = server.wait_for("IsReady", "decode-0")["url"]
        server.wait_for("AllReady")
        front = Front(links, _port(url))
        front.submit(5)
        front.answer()
        psutil.Process(server.pid("decode-1")).kill()
        told = front.hear().body
        assert isinstance(told, Finished)
        assert (told.room, told.message) == (b"decode-1", "fenced")


def test_a_wrong_configuration_of_a_worker_is_the_last_word_of_its_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0", model="not-a-model")]) as server:
        assert server.wait_for("GivenUp")["reason"] == "decode-0: config.json: not found in the model folder"
        assert server.process.wait(PATIENCE_S) == Exit.CONFIG


def test_a_worker_whose_thread_died_is_started_again(tmp_path: Path, links: Links) -> None:
    with running(tmp_path, [supervised(tmp_path, "decode-0", model="step-dies")]) as server:
        url = server.wait_for("IsReady")["url"]
        Front(links, int(url.rpartition(":")[2])).submit(5)
        ended = server.wait_for("Ended")
        assert ended["code"] == Exit.THREAD_DIED
        assert any("the device is lost" in line for line in ended["tail"])
        assert server.wait_for("IsReady")["url"] == url


def test_a_killed_worker_whose_port_was_taken_comes_back_elsewhere(tmp_path: Path, links: Links) -> None:
    """The kernel gave it that port, and may give it to any program while it is away."""
    with running(tmp_path, [supervised(tmp_path, "decode-0")]) as server:
        port = _port(server.wait_for("IsReady")["url"])
        with losing_its_port(server.pid("decode-0"), port, server.process.pid):
            server.wait_for("Ended")
            elsewhere = _port(server.wait_for("IsReady")["url"])
        assert elsewhere != port
        front = Front(links, elsewhere)
        front.submit(5)
        assert front.answer() == (6,)
        assert server.end() == 0


def test_a_killed_worker_returns_to_the_port_it_was_told_and_no_other(tmp_path: Path) -> None:
    told = free_port()
    children = [supervised(tmp_path, "decode-0", port=told)]
    with running(tmp_path, children, max_restarts=1000) as server:  # many fall into the time in which it is taken
        assert _port(server.wait_for("IsReady")["url"]) == told
        with losing_its_port(server.pid("decode-0"), told, server.process.pid):
            assert server.wait_for("Ended")["code"] == -signal.SIGKILL
            assert server.wait_for("Ended")["code"] == Exit.CONFIG
        assert _port(server.wait_for("IsReady")["url"]) == told
        assert server.end() == 0


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])
