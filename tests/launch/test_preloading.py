"""A supervisor that forks its children from a preload process: what they are then, and what happens without it."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.process.worker.server import CHILD, Said, Server, child, running, wait_until_gone

FRONT = child("front", "serve", "FRONT") | {"may_be_forked": False}
DECODE = child("decode-0", "serve", "DECODE")
PREFILL = child("prefill-0", "serve", "PREFILL")
GONE = "workers load by themselves from now on"


def preload_of(server: Server) -> psutil.Process:
    """The supervisor's preload process."""
    children = psutil.Process(server.process.pid).children()
    (found,) = (each for each in children if any("preload.py" in word for word in each.cmdline()))
    return found


def shown(folder: Path, preload: str | None) -> list[Said]:
    """What two children found at their start."""
    folder.mkdir()
    pair = [child(name, "show") | {"env": {"OF_CHILD": name}} for name in ("decode-0", "decode-1")]
    with running(folder, pair, preload) as server:
        server.wait_for("AllReady")
        return [json.loads(server.wait_for_log(name, "\n").splitlines()[0]) for name in ("decode-0", "decode-1")]


def test_a_forked_child_finds_what_a_started_one_does(tmp_path: Path) -> None:
    started, forked = shown(tmp_path / "started", None), shown(tmp_path / "forked", "forks")
    assert len({each.pop("random") for each in (*started, *forked)}) == 4
    assert forked == started
    assert [each["variable"] for each in forked] == ["decode-0", "decode-1"]
    assert all(each["leads_its_session"] for each in forked)


def test_ps_shows_what_each_child_is(tmp_path: Path) -> None:
    with running(tmp_path, [FRONT, DECODE, PREFILL], "forks") as server:
        server.wait_for("AllReady")
        for name in ("decode-0", "prefill-0"):
            process = psutil.Process(server.pid(name))
            assert process.cmdline()[1:] == ["-m", CHILD, "serve"]
            assert process.ppid() == server.process.pid
        assert "preload.py" in preload_of(server).cmdline()[1]


def test_a_preload_process_that_is_killed_takes_no_child_with_it(tmp_path: Path) -> None:
    """What ends afterwards is started as a program."""
    with running(tmp_path, [FRONT, DECODE, PREFILL], "forks", first_delay_s=0.01) as server:
        server.wait_for("AllReady")
        preload_of(server).kill()
        assert server.wait_for("Says", "preload")["text"] == f"ended with signal SIGKILL: {GONE}"
        os.kill(server.pid("decode-0"), signal.SIGKILL)
        assert server.wait_for("Ended")["name"] == "decode-0"
        server.wait_for("AllReady")
        assert len(server.pids["prefill-0"]) == 1
        assert server.end() == 0


def test_one_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, [DECODE, PREFILL], "forks", first_delay_s=0.01) as server:
        server.wait_for("AllReady")
        preload_of(server).suspend()
        os.kill(server.pid("decode-0"), signal.SIGKILL)
        assert server.wait_for("Says", "preload")["text"] == f"a preload process does not answer: {GONE}"
        server.wait_for("AllReady")
        assert [
            each.pid for each in psutil.Process(server.process.pid).children() if each.pid not in all_pids(server)
        ] == []


def all_pids(server: Server) -> set[int]:
    return {pid for pids in server.pids.values() for pid in pids}


@pytest.mark.parametrize("behaviour", ["fails", "has-threads"])
def test_children_start_as_programs_where_nothing_can_be_forked(tmp_path: Path, behaviour: str) -> None:
    with running(tmp_path, [FRONT, DECODE, PREFILL], behaviour) as server:
        assert server.wait_for("Says", "preload")["text"] == f"ended with exit code 1: {GONE}"
        server.wait_for("AllReady")
        assert server.end() == 0


def test_one_that_loads_for_ever_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, [DECODE], "hangs", start_timeout_s=8.0) as server:
        assert server.wait_for("Says", "preload")["text"] == f"ended with signal SIGKILL: {GONE}"
        server.wait_for("AllReady")


def test_a_stop_while_it_loads_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path, [FRONT, DECODE], "hangs", start_timeout_s=3600.0) as server:
        server.wait_for("IsReady", "front")
        preload = preload_of(server)
        assert server.end() == 0
        assert "decode-0" not in server.pids
        assert not preload.is_running()


def test_it_ends_with_the_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, [DECODE, PREFILL], "forks") as server:
        server.wait_for("AllReady")
        preload = preload_of(server)
        server.process.kill()
        wait_until_gone(preload.pid)
