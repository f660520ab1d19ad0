"""A worker is kept running on its node, is started again when it ends, and nobody is started in vain."""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event

import psutil
import pytest

from deltaserve.launch.clusters import worker_keeper
from deltaserve.launch.clusters.worker_keeper import KeeperReport, WorkerKeeper
from deltaserve.launch.clusters.worker_plan import PlannedWorker, plan_workers
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec
from deltaserve.process.children.child_events import ChildEvent, Ended
from deltaserve.process.children.exits import Exit
from deltaserve.settings.flags.merge import load
from tests.patience import PATIENCE_S
from tests.ports import free_port, taken

HOST = "127.0.0.1"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(48))
    return path


def planned(model: Path, key: Path, *flags: str) -> PlannedWorker:
    """The decode worker, whose port is the second."""
    argv = [str(model), "--cluster", "ray", "--cluster-key-file", str(key), "--page-size", "16", "--num-pages", "64"]
    port = str(free_port() - 1)
    settings = load("serve", "", [*argv, "--disaggregation-bootstrap-port", port, *flags], {}).settings
    (_, decode) = plan_workers(settings, 0)
    return decode


class Kept:
    """A keeper, and all that it has told so far."""

    def __init__(self, worker: PlannedWorker) -> None:
        self.keeper = WorkerKeeper(worker, HOST)
        self.lines: list[str] = []
        self._num_seen = 0

    def look(self) -> KeeperReport:
        report = self.keeper.report(self._num_seen)
        self.lines += report.lines
        self._num_seen = report.num_lines
        return report

    def wait_for(self, condition: Callable[[KeeperReport], bool], what: str) -> KeeperReport:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(report := self.look()):
            assert time.monotonic() < deadline, f"{what}: {self.lines}"
            time.sleep(0.05)
        return report

    def pid(self) -> int:
        line = [line for line in self.lines if ": starting, process " in line][-1]
        return int(line.rpartition(" ")[2])


@pytest.fixture
def keep() -> Iterator[Callable[[PlannedWorker], Kept]]:
    made: list[Kept] = []

    def start(worker: PlannedWorker) -> Kept:
        made.append(Kept(worker))
        return made[-1]

    yield start
    for kept in made:
        kept.keeper.stop()
        kept.keeper.stop()
        assert kept.keeper.wait(PATIENCE_S)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Until it is set, a supervisor that has told of the end of its child does not start it again."""
    was_seen = Event()

    class Waiting(Supervisor):
        def __init__(
            self, children: Sequence[ChildSpec], options: SupervisorOptions, on_event: Callable[[ChildEvent], None]
        ) -> None:
            def tell(event: ChildEvent) -> None:
                on_event(event)
                if isinstance(event, Ended):
                    assert was_seen.wait(PATIENCE_S)

            super().__init__(children, options, tell)

    monkeypatch.setattr(worker_keeper, "Supervisor", Waiting)
    return was_seen


def test_a_killed_worker_is_started_again_where_it_was(
    tiny_models: Path, key: Path, keep: Callable[[PlannedWorker], Kept], seen: Event
) -> None:
    worker = planned(tiny_models / "llama", key)
    kept = keep(worker)
    first = kept.wait_for(lambda report: report.is_ready, "readiness")
    assert first.host == HOST
    assert f"decode-0: ready at tcp://{HOST}:{worker.port}" in kept.lines
    assert first.num_lines == len(kept.lines)
    old = kept.pid()
    assert psutil.Process(old).cmdline()[1:3] == ["-m", "deltaserve.process.worker.worker"]
    os.kill(old, signal.SIGKILL)
    try:
        kept.wait_for(lambda report: not report.is_ready, "its end to be seen")
    finally:
        seen.set()
    second = kept.wait_for(lambda report: report.is_ready, "readiness again")
    assert kept.pid() != old
    assert second.life == first.life, "the keeper is the same"
    kept.keeper.stop()
    last = kept.wait_for(lambda report: report.exit_code is not None, "its end")
    assert (last.exit_code, last.is_ready) == (Exit.OK, False)
    assert kept.lines[-1] == "decode-0: ended with exit code 0"
    assert not psutil.pid_exists(old)


def test_what_cannot_run_there_is_not_tried_again(
    tmp_path: Path, key: Path, keep: Callable[[PlannedWorker], Kept]
) -> None:
    kept = keep(planned(tmp_path / "none", key))
    report = kept.wait_for(lambda report: report.exit_code is not None, "its end")
    assert report.exit_code == Exit.CONFIG
    assert len([line for line in kept.lines if "starting, process" in line]) == 1
    assert any("none: not a folder" in line for line in kept.lines)


def test_a_port_that_is_still_taken_is_waited_for(
    tiny_models: Path, key: Path, keep: Callable[[PlannedWorker], Kept]
) -> None:
    """The worker that had it may be just ending."""
    worker = planned(tiny_models / "llama", key)
    with taken(worker.port):
        kept = keep(worker)
        time.sleep(0.5)
        assert kept.look().num_lines == 0
    kept.wait_for(lambda report: report.is_ready, "readiness")


def test_a_keeper_that_is_stopped_first_starts_nothing(
    tiny_models: Path, key: Path, keep: Callable[[PlannedWorker], Kept]
) -> None:
    worker = planned(tiny_models / "llama", key)
    with taken(worker.port):
        kept = keep(worker)
        kept.keeper.stop()
        report = kept.wait_for(lambda report: report.exit_code is not None, "its end")
    assert report.exit_code == Exit.OK
    assert kept.lines == []


def test_a_log_lies_where_it_was_asked_for(
    tiny_models: Path, key: Path, tmp_path: Path, keep: Callable[[PlannedWorker], Kept]
) -> None:
    kept = keep(planned(tiny_models / "llama", key, "--log-dir", str(tmp_path / "logs")))
    kept.wait_for(lambda report: report.is_ready, "readiness")
    assert "ready on" in (tmp_path / "logs" / "decode-0.log").read_text()


def test_a_keeper_that_fails_says_so(
    tmp_path: Path, key: Path, keep: Callable[[PlannedWorker], Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its worker would be taken for one that starts, for ever."""

    def fail(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(worker_keeper, "require_free_port", fail)
    kept = keep(planned(tmp_path / "none", key))
    report = kept.wait_for(lambda report: report.exit_code is not None, "its end")
    assert report.exit_code == Exit.FAILED
    assert kept.lines == ["decode-0: RuntimeError: nobody foresaw this"]
