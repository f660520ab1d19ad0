"""The supervisor, with real processes: programs that it starts, and forks of a preload process."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.process.worker import server as servers
from tests.process.worker.server import CHILD, Said, Server, child, is_alive, wait_until, wait_until_gone

Running = Callable[..., AbstractContextManager[Server]]

FRONT = child("front", "serve", "FRONT")
DECODE = child("decode-0", "serve", "DECODE")
PREFILL = child("prefill-0", "serve", "PREFILL")


@pytest.fixture(params=[None, "forks"], ids=["programs", "forks"])
def running(request: pytest.FixtureRequest) -> Running:
    """Both ways a child comes to be; all else is alike."""
    return partial(servers.running, preload=request.param)


def test_all_start_and_hear_of_each_other(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, DECODE, PREFILL]) as server:
        assert server.wait_for("Says", "front")["text"] == "waking up"
        server.wait_for("AllReady")
        names = {"front", "decode-0", "prefill-0"}
        for name in names:
            for other in names - {name}:  # known from the welcome, or announced later
                server.wait_for_log(name, f" {other}\n")


def test_a_death_is_told_to_the_others_and_the_child_comes_back_on_its_port(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, DECODE, PREFILL]) as server:
        url = server.wait_for("IsReady", "prefill-0")["url"]
        server.wait_for("AllReady")
        os.kill(server.pid("prefill-0"), signal.SIGKILL)
        assert server.wait_for("Ended", "prefill-0")["code"] == -signal.SIGKILL
        for name in ("front", "decode-0"):
            server.wait_for_log(name, "PeerDown prefill-0")
        assert server.wait_for("IsReady", "prefill-0")["url"] == url
        server.wait_for("AllReady")
        for name in ("front", "decode-0"):
            log = server.wait_for_log(name, "PeerDown prefill-0\nPeerUp prefill-0")
            assert log.count("PeerDown") == 1
        assert "known front" in server.wait_for_log("prefill-0", "known decode-0")


def test_what_keeps_ending_ends_the_server_with_the_reason(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [DECODE, child("prefill-0", "crash", "PREFILL")], first_delay_s=0.01) as server:
        assert server.wait_for("Ended", "prefill-0")["tail"] == ["the roof is on fire"]
        reason = server.wait_for("GivenUp")["reason"]
        assert "prefill-0 keeps ending (5 restarts and not ready after the last)" in reason
        assert server.process.wait(PATIENCE_S) == 1
        assert len(server.pids["prefill-0"]) == 6
        assert (tmp_path / "decode-0.log").read_text().count("draining") == 1


def test_starts_that_never_become_ready_count_however_slow_they_are(tmp_path: Path, running: Running) -> None:
    """None of them falls within the window of another: out of memory while loading, minutes after each start."""
    options = {"first_delay_s": 0.01, "window_s": 0.0, "max_restarts": 3}
    with running(tmp_path, [DECODE, child("prefill-0", "crash", "PREFILL")], **options) as server:
        reason = server.wait_for("GivenUp")["reason"]
        assert reason == "prefill-0 keeps ending (3 restarts and not ready after the last)"
        assert server.process.wait(PATIENCE_S) == 1
        assert len(server.pids["prefill-0"]) == 4


def test_a_first_start_that_hangs_ends_the_server_with_the_reason(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, child("prefill-0", "hang", "PREFILL")], start_timeout_s=0.2) as server:
        assert server.wait_for("GivenUp")["reason"] == "prefill-0: not ready 0.2 s after its start"
        assert server.process.wait(PATIENCE_S) == 1
        assert len(server.pids["prefill-0"]) == 1


def test_a_later_start_that_hangs_is_started_again(tmp_path: Path, running: Running) -> None:
    """The others serve meanwhile: one stuck load is no reason to end them."""
    options = {"start_timeout_s": 8.0, "first_delay_s": 0.01, "max_restarts": 1}
    with running(tmp_path, [DECODE, child("prefill-0", "hang-later", "PREFILL")], **options) as server:
        server.wait_for("AllReady")
        os.kill(server.pid("prefill-0"), signal.SIGKILL)
        assert server.wait_for("Ended", "prefill-0")["code"] == -signal.SIGKILL
        said = [server.wait_for("Says", "prefill-0")["text"] for _ in range(2)]
        assert said == ["waking up", "not ready 8 s after its start"]
        assert server.wait_for("Ended", "prefill-0")["killed_because"] == "it was not ready in time"
        assert "1 restarts and not ready after the last" in server.wait_for("GivenUp")["reason"]
        assert len(server.pids["prefill-0"]) == 2


def test_restarts_wait_longer_each_time(tmp_path: Path, running: Running) -> None:
    options = {"first_delay_s": 0.05, "max_delay_s": 0.2, "max_restarts": 4}
    with running(tmp_path, [child("prefill-0", "crash-after-ready", "PREFILL")], **options) as server:
        server.wait_for("GivenUp")
        assert server.process.wait(PATIENCE_S) == 1
        assert len(server.pids["prefill-0"]) == 5


def test_a_start_is_told_the_last_number_of_the_one_before_it(tmp_path: Path, running: Running) -> None:
    """Which may have changed while that lived."""
    with running(tmp_path, [child("prefill-0", "reboots", "PREFILL")], first_delay_s=0.05) as server:
        server.wait_for_log("prefill-0", "started after 0\n")
        server.wait_for_log("prefill-0", "started after 1000000000\n")


def test_a_config_error_is_one_line_and_no_restart(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, child("prefill-0", "refuse", "PREFILL")]) as server:
        assert server.wait_for("GivenUp")["reason"] == "prefill-0: page_size 3: not a power of two"
        assert server.process.wait(PATIENCE_S) == 2
        assert len(server.pids["prefill-0"]) == 1


def test_exit_code_2_without_a_word_shows_the_last_line(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [child("prefill-0", "bare-exit-2", "PREFILL")]) as server:
        assert server.wait_for("GivenUp")["reason"] == "prefill-0: port 80: permission denied"
        assert server.process.wait(PATIENCE_S) == 2


def test_a_program_that_is_not_there_ends_the_server(tmp_path: Path, running: Running) -> None:
    absent = {"name": "prefill-0", "kind": "PREFILL", "argv": ["/nonexistent/program"]}
    with running(tmp_path, [FRONT, absent]) as server:
        assert "cannot start /nonexistent/program" in server.wait_for("GivenUp")["reason"]
        assert server.process.wait(PATIENCE_S) == 1


class Removable:
    """A child's program that can be taken away: then no start of it succeeds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "program"
        self._aside = folder / "aside"
        self._aside.write_text(f"#!{sys.executable}\nimport sys\nfrom {CHILD} import main\nsys.exit(main('serve'))\n")
        self._aside.chmod(0o700)
        self.put_back()

    def remove(self) -> None:
        self.path.rename(self._aside)

    def put_back(self) -> None:
        self._aside.rename(self.path)

    def child(self, name: str, kind: str) -> Said:
        return {"name": name, "kind": kind, "argv": [str(self.path)]}


def test_a_later_start_that_fails_is_tried_again(tmp_path: Path) -> None:
    """The machine may have no process, memory or descriptor to spare just then; the others serve meanwhile."""
    program = Removable(tmp_path)
    options = {"first_delay_s": 0.05, "max_delay_s": 0.2, "max_restarts": 100_000}
    with servers.running(tmp_path, [DECODE, program.child("prefill-0", "PREFILL")], None, **options) as server:
        server.wait_for("AllReady")
        program.remove()
        os.kill(server.pid("prefill-0"), signal.SIGKILL)
        server.wait_for("Ended", "prefill-0")
        said = [server.wait_for("Says", "prefill-0")["text"] for _ in range(2)]
        assert said == [f"cannot start {program.path}: No such file or directory"] * 2
        program.put_back()
        server.wait_for("AllReady")
        assert len(server.pids["decode-0"]) == 1


def test_later_starts_that_keep_failing_end_the_server(tmp_path: Path) -> None:
    program = Removable(tmp_path)
    options = {"first_delay_s": 0.01, "max_restarts": 3}
    with servers.running(tmp_path, [DECODE, program.child("prefill-0", "PREFILL")], None, **options) as server:
        server.wait_for("AllReady")
        program.remove()
        os.kill(server.pid("prefill-0"), signal.SIGKILL)
        reason = server.wait_for("GivenUp")["reason"]
        assert reason == "prefill-0 keeps ending (3 restarts and not ready after the last)"
        assert server.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_a_group_that_cannot_start_ends_the_others_until_it_can(tmp_path: Path, which: int) -> None:
    program = Removable(tmp_path)
    members = [child("decode-0", "serve"), child("decode-1", "serve")]
    members[which] = program.child(f"decode-{which}", "DECODE")
    options = {"first_delay_s": 0.05, "max_delay_s": 0.2, "max_restarts": 100_000, "hurried_s": 0.1}
    with servers.running(tmp_path, [member | {"group": "g"} for member in members], None, **options) as server:
        server.wait_for("AllReady")
        program.remove()
        os.kill(server.pid(f"decode-{which}"), signal.SIGKILL)
        for _ in range(2):
            while not server.wait_for("Says", f"decode-{which}")["text"].startswith("cannot start"):
                pass
        program.put_back()
        server.wait_for("AllReady")


def test_sigterm_drains_front_then_decode_then_prefill(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [PREFILL, DECODE, FRONT]) as server:
        server.wait_for("AllReady")
        assert server.end() == 0
        ended = [server.wait_for("Ended") for _ in range(3)]
        assert [e["name"] for e in ended] == ["front", "decode-0", "prefill-0"]
        assert [e["code"] for e in ended] == [0, 0, 0]


def test_sigint_does_the_same(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [DECODE, FRONT]) as server:
        server.wait_for("AllReady")
        assert server.end(signal.SIGINT) == 0


def test_what_does_not_end_within_its_grace_is_killed(tmp_path: Path, running: Running) -> None:
    options = {"grace_s": 5.0, "worker_grace_s": 5.0, "last_words_s": 0.0}  # decode must end in as long
    with running(tmp_path, [child("front", "stubborn", "FRONT"), DECODE], **options) as server:
        server.wait_for("AllReady")
        assert server.end() == 0
        front = server.wait_for("Ended", "front")
        assert (front["code"], front["killed_because"]) == (-signal.SIGKILL, "its grace was over")
        decode = server.wait_for("Ended", "decode-0")
        assert (decode["code"], decode["killed_because"]) == (0, None)


def test_a_second_sigterm_does_not_wait_for_the_grace(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [child("front", "stubborn", "FRONT"), DECODE], grace_s=3600.0) as server:
        server.wait_for("AllReady")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("Stopping")
        assert server.end() == 0


def test_a_second_sigterm_holds_for_those_that_would_drain_later(tmp_path: Path, running: Running) -> None:
    children = [child("front", "stubborn", "FRONT"), child("decode-0", "stubborn")]
    with running(tmp_path, children, grace_s=3600.0, hurried_s=0.2) as server:
        server.wait_for("AllReady")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("Stopping")
        assert server.end() == 0
        assert {server.wait_for("Ended")["killed_because"] for _ in children} == {"its grace was over"}


def test_the_children_end_with_the_supervisor(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, child("prefill-0", "stubborn", "PREFILL")]) as server:
        server.wait_for("AllReady")
        pids = [server.pid("front"), server.pid("prefill-0")]
        assert all(is_alive(pid) for pid in pids)
        server.process.kill()
        for pid in pids:
            wait_until_gone(pid)


def test_a_child_that_stops_reading_does_not_hold_up_the_others(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT, DECODE, PREFILL]) as server:
        server.wait_for("AllReady")
        os.kill(server.pid("decode-0"), signal.SIGSTOP)
        os.kill(server.pid("prefill-0"), signal.SIGKILL)
        server.wait_for_log("front", "PeerDown prefill-0\nPeerUp prefill-0")
        os.kill(server.pid("decode-0"), signal.SIGCONT)
        server.wait_for_log("decode-0", "PeerDown prefill-0\nPeerUp prefill-0")


def test_logs_belong_to_the_user_alone(tmp_path: Path, running: Running) -> None:
    with running(tmp_path, [FRONT]) as server:
        server.wait_for("AllReady")
        assert (tmp_path / "front.log").stat().st_mode & 0o077 == 0


def test_the_log_of_a_talkative_child_stays_bounded(tmp_path: Path, running: Running) -> None:
    """Twice the limit at most, and what it wrote between two looks; the child never notices."""
    options = {"max_log_bytes": 50_000, "look_s": 0.1}
    log, kept = tmp_path / "decode-0.log", tmp_path / "decode-0.log.1"
    with running(tmp_path, [child("decode-0", "talkative")], **options) as server:
        server.wait_for("AllReady")
        for _ in range(2):
            kept.unlink(missing_ok=True)
            wait_until(kept.exists)
        wait_until(lambda: log.stat().st_size > 0)
        assert "blah" in kept.read_text()
        assert kept.stat().st_mode & 0o077 == 0
        wait_until(lambda: log.stat().st_size < 1_000_000)  # again and again, also where a busy machine looks late
        os.kill(server.pid("decode-0"), signal.SIGKILL)
        assert server.wait_for("Ended")["code"] == -signal.SIGKILL


def test_removed_logs_and_a_full_disk_end_nobody(tmp_path: Path, running: Running) -> None:
    """Everything of the folder is gone, then the place of the kept part is a full device; logs are still bounded."""
    options = {"max_log_bytes": 50_000, "look_s": 0.05, "first_delay_s": 0.01}
    log, kept = tmp_path / "decode-0.log", tmp_path / "decode-0.log.1"
    with running(tmp_path, [child("decode-0", "talkative"), PREFILL], **options) as server:
        server.wait_for("AllReady")
        log.unlink()
        kept.unlink(missing_ok=True)
        (tmp_path / "prefill-0.log").unlink()
        wait_until(kept.exists)  # what the removed file held
        os.kill(server.pid("decode-0"), signal.SIGKILL)
        server.wait_for("Ended", "decode-0")
        server.wait_for("AllReady")
        wait_until(log.exists)
        full = tmp_path / "full"
        full.symlink_to("/dev/full")
        full.replace(kept)
        wait_until(lambda: not kept.exists() or not kept.is_symlink())
        assert server.end() == 0


def test_without_a_place_for_a_log_its_last_lines_are_kept_in_memory(tmp_path: Path, running: Running) -> None:
    (tmp_path / "prefill-0.log").mkdir()
    with running(tmp_path, [child("prefill-0", "crash", "PREFILL")], max_restarts=1) as server:
        assert "Is a directory" in server.wait_for("Says", "prefill-0")["text"]
        assert server.wait_for("Ended", "prefill-0")["tail"] == ["the roof is on fire"]


def test_a_stopped_child_is_told_of_and_left_alone(tmp_path: Path, running: Running) -> None:
    """It may be in a debugger. Its pid is said, so that somebody can let it go on or end it."""
    with running(tmp_path, [FRONT, DECODE], look_s=0.05) as server:
        server.wait_for("AllReady")
        pid = server.pid("decode-0")
        os.kill(pid, signal.SIGSTOP)
        assert server.wait_for("Halted", "decode-0")["pid"] == pid
        server.wait_for_log("front", f"PeerHalted decode-0 {pid}")
        os.kill(pid, signal.SIGCONT)
        assert server.wait_for("Says", "decode-0")["text"] == "goes on"
        server.wait_for_log("front", "PeerHalted decode-0 None")
        os.kill(pid, signal.SIGSTOP)
        server.wait_for("Halted", "decode-0")
        os.kill(pid, signal.SIGKILL)
        assert server.wait_for("Ended", "decode-0")["code"] == -signal.SIGKILL
        server.wait_for("IsReady", "decode-0")


def test_children_of_a_group_end_and_start_together(tmp_path: Path, running: Running) -> None:
    """Those that do not see by themselves that one has ended are killed; nobody starts before all are gone."""
    members = [child(f"decode-{i}", "stubborn", "DECODE") | {"group": "g"} for i in range(3)]
    with running(tmp_path, [*members, PREFILL], first_delay_s=0.01, hurried_s=0.3) as server:
        server.wait_for("AllReady")
        os.kill(server.pid("decode-1"), signal.SIGKILL)
        ended = [server.wait_for("Ended") for _ in members]  # the last two in either order
        assert {said["name"] for said in ended} == {member["name"] for member in members}
        assert all(said["code"] == -signal.SIGKILL for said in ended)
        assert [said["killed_because"] for said in ended] == [None, *["another of its group has ended"] * 2]
        server.wait_for("AllReady")
        assert {name: len(pids) for name, pids in server.pids.items()} == {
            "decode-0": 2,
            "decode-1": 2,
            "decode-2": 2,
            "prefill-0": 1,
        }
