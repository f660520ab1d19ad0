"""Mailbox, spec files, metric families."""

import errno
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from deltaserve.control.engine.api import InstanceOptions
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Role
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec, Kind
from deltaserve.process.children.child_events import Ended
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.log_file import LogFile, telling
from deltaserve.process.children.mailbox import Mailbox
from deltaserve.process.worker.worker_spec import read_secret, read_spec, worker_environment
from tests.process.worker.workers import SECRET, write_worker


def is_readable(mailbox: Mailbox[int]) -> bool:
    return bool(select.select([mailbox], [], [], 0)[0])


def test_a_mailbox_wakes_its_reader_once_for_all_that_was_put() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert mailbox.take_all() == []
    assert not is_readable(mailbox)

    def put_many() -> None:
        for i in range(1000):
            mailbox.put(i)

    threads = [threading.Thread(target=put_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_readable(mailbox)
    assert sorted(mailbox.take_all()) == sorted([*range(1000)] * 3)
    assert not is_readable(mailbox)


def test_more_wakes_than_the_pipe_holds_block_nobody() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for i in range(200_000):
        mailbox.put(i)
    assert len(mailbox.take_all()) == 200_000
    assert not is_readable(mailbox)


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    path = write_worker(tmp_path, role=Role.PREFILL, num_pages=(7,), options=InstanceOptions(share_wait_s=0.25))
    spec = read_spec(path)
    assert (spec.role, spec.num_pages, spec.options.share_wait_s) == (Role.PREFILL, (7,), 0.25)
    assert path.stat().st_mode & 0o077 == 0
    assert read_secret(spec) == SECRET
    over_ucx = msgspec.structs.replace(spec, transport="nixl", transport_tls="tcp,self")
    assert worker_environment(over_ucx)["UCX_NET_DEVICES"] == "lo"
    assert not any(name.startswith("UCX") for name in worker_environment(spec))


def test_what_ucx_prints_is_the_operators_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(write_worker(tmp_path, transport="nixl", transport_tls="tcp,self"))
    monkeypatch.delenv("UCX_LOG_LEVEL", raising=False)
    assert worker_environment(spec)["UCX_LOG_LEVEL"] == "fatal"
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    assert worker_environment(spec)["UCX_LOG_LEVEL"] == "info"


def test_a_wrong_spec_names_its_field(tmp_path: Path) -> None:
    path = write_worker(tmp_path)
    fields = msgspec.json.decode(path.read_bytes())
    wrong = {"role": "queen", "num_page": 1, "dtype": "int4", "transport": "by hand"}
    for word, changed in ((name, {name: value}) for name, value in wrong.items()):
        path.write_bytes(msgspec.json.encode({**fields, **changed}))
        with pytest.raises(ConfigError, match=word):
            read_spec(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_spec(tmp_path / "absent.json")


def test_a_short_or_absent_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    spec = read_spec(write_worker(tmp_path))
    Path(spec.secret_path).write_bytes(b"  short-secret \n")
    with pytest.raises(ConfigError, match="12 bytes") as caught:
        read_secret(spec)
    assert "short-secret" not in str(caught.value)
    Path(spec.secret_path).chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644, others can reach it"):
        read_secret(spec)
    Path(spec.secret_path).unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(spec)


def test_two_children_of_one_name_are_refused(tmp_path: Path) -> None:
    child = ChildSpec("decode-0", ("true",), Kind.DECODE)
    with pytest.raises(ValueError, match="one name"):
        Supervisor([child, child], SupervisorOptions(tmp_path), print)


def test_how_a_process_ended_reads_well() -> None:
    assert str(Ended("decode-0", -15)) == "decode-0: ended with signal SIGTERM"
    assert str(Ended("decode-0", -9)).startswith("decode-0: ended with signal SIGKILL (somebody's kill -9, or the ker")
    killed = str(Ended("decode-0", -9, killed_because="its grace was over"))
    assert killed == "decode-0: ended with signal SIGKILL (the supervisor's: its grace was over)"
    assert str(Ended("decode-0", 1, ("a", "b"))) == "decode-0: ended with exit code 1\n    a\n    b"


def test_a_process_that_cannot_be_watched_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in sandboxes without pidfd_open."""
    started: list[int] = []

    def refuse(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    said: list[str] = []
    supervisor = Supervisor(
        [ChildSpec("decode-0", ("sleep", "3600"), Kind.DECODE)],
        SupervisorOptions(tmp_path),
        lambda event: said.append(str(event)),
    )
    assert supervisor.run() is Exit.FAILED
    assert said == ["decode-0: cannot start sleep: pidfd_open: Function not implemented"]
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_process_ends_with_its_code_when_nothing_can_be_written() -> None:
    """A full disk under its log must not keep alive what has to end."""
    program = """
import sys
from deltaserve.process.children.exits import Exit, end_process
sys.stdout.buffer.write(b"not flushed yet")
end_process(Exit.STUCK, "no turn")
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, env=buffered, check=False)
    assert ended.returncode == Exit.STUCK


def test_the_tail_of_a_log_is_what_says_why() -> None:
    ordinary = "2026-01-02 03:04:05,678 decode-0 INFO MainThread deltaserve.process.worker.loop: 3 run, 0 wait"
    in_json = '{"time": "2026-01-02T03:04:05.678Z", "level": "info", "process": "decode-0", "message": "3 run"}'
    warning = ordinary.replace("INFO", "WARNING")
    of_a_rank = ordinary.replace("decode-0", "decode-0 rank 1")
    trace = ("Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "MemoryError")
    for code in (1, -9):
        assert telling((ordinary, warning, in_json, of_a_rank, *trace), code) == (warning, *trace)
    assert telling((ordinary,) * 10, 1) == (ordinary,) * 3
    assert telling((ordinary,) * 10, -9) == (), "what it did in passing says nothing about a signal"
    assert telling((), 1) == ()


def test_a_line_that_is_not_whole_is_no_part_of_the_tail(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log")
    os.write(log.fileno(), b"a" * 3000 + b"\n" + b"b" * 3000 + b"\nlast\n")
    assert log.tail(20) == ("b" * 3000, "last")
    log.close()
