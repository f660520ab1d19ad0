"""A file and a name whose workers come and go."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deltaserve.process.front.worker_sources import watch_file, watch_name
from deltaserve.settings.worker_list import WorkerEntry, parse_worker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
_OFTEN_S = 0.01


class _Heard:
    """What a listener was told, and a wait for more."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self._more = asyncio.Event()

    def __call__(self, source: str, entries: Sequence[WorkerEntry]) -> None:
        self.names.append([entry.name for entry in entries])
        self._more.set()

    async def told(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.names) < count:
                self._more.clear()
                await self._more.wait()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(_OFTEN_S)


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path, heard = tmp_path / "workers", _Heard()
    task = asyncio.create_task(watch_file(path, heard, _OFTEN_S))
    try:
        await _until(lambda: "No such file" in caplog.text)
        path.write_text("a=prefill@h:1\n")
        await heard.told(1)
        other = tmp_path / "other"
        other.write_text("a=prefill@h:1\nb=decode@h:2\n")
        os.replace(other, path)  # as config maps and editors do
        await heard.told(2)
        path.write_text("a=prefill@h:1\nb=decode@h:")  # half written
        await _until(lambda: "is no worker" in caplog.text)
        path.write_bytes(b"\xff\xfe")
        await _until(lambda: "utf-8" in caplog.text)
        path.write_text("# nobody\n")  # an editor that writes in place passes through it
        await _until(lambda: "names no worker" in caplog.text)
        path.unlink()
        os.mkfifo(path)
        await _until(lambda: "no regular file" in caplog.text)
        path.unlink()
        await _until(lambda: caplog.text.count("No such file") == 2)
        assert len(heard.names) == 2, "what cannot be read changes nothing"
        path.write_text("b=decode@h:2\n")
        await heard.told(3)
    finally:
        task.cancel()
    assert heard.names == [["a"], ["a", "b"], ["b"]]


async def test_a_name_is_looked_up_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    heard = _Heard()
    answers: list[list[str]] = [["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2", "10.0.0.2"], [], ["10.0.0.3"]]

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("prefill.svc", 8998)
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if not addresses:
            raise OSError("Name or service not known")
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    task = asyncio.create_task(watch_name(parse_worker("prefill@prefill.svc:8998"), heard, _OFTEN_S))
    try:
        await heard.told(2)
    finally:
        task.cancel()
    assert heard.names == [["prefill-10.0.0.1:8998", "prefill-10.0.0.2:8998"], ["prefill-10.0.0.3:8998"]]
    assert "Name or service not known" in caplog.text


async def test_a_real_name_resolves() -> None:
    heard = _Heard()
    task = asyncio.create_task(watch_name(parse_worker("decode@localhost:8998"), heard, _OFTEN_S))
    try:
        await heard.told(1)
    finally:
        task.cancel()
    assert heard.names == [["decode-127.0.0.1:8998"]]


@pytest.mark.parametrize("source", ["name", "file"])
def test_a_source_that_stays_silent_keeps_no_process_from_ending(source: str) -> None:
    """A name server, or a network's disk, that answers never: neither the loop's end nor the interpreter's waits."""
    command = [sys.executable, "-m", "tests.process.front.silent_source", source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the loop is closed\n", "")


async def test_what_nobody_foresaw_is_logged_once_and_looked_past(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread to read with, or a listener with a bug: the next look may find things as they should be."""
    heard, num_failed = _Heard(), 0
    path = tmp_path / "workers"
    path.write_text("a=prefill@h:1\n")

    def listen(source: str, entries: Sequence[WorkerEntry]) -> None:
        nonlocal num_failed
        if num_failed < 5:
            num_failed += 1
            raise RuntimeError("can't start new thread")
        heard(source, entries)

    task = asyncio.create_task(watch_file(path, listen, _OFTEN_S))
    try:
        await heard.told(1)
    finally:
        task.cancel()
    assert heard.names == [["a"]]
    assert caplog.text.count("RuntimeError: can't start new thread; what it said last counts on") == 1
