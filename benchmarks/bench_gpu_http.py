"""A server in processes of its own, and the project's client in several: one client process is slower than a GPU."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path

import httpx

from deltaserve.commands.client.completion_stream import LENIENT, ServerDialect, listed_models
from deltaserve.commands.client.http_client import async_http_client
from deltaserve.commands.load.load_client import Client, Load, Measurement
from deltaserve.commands.load.moved_bytes import MovedBytes, settled_bytes
from deltaserve.commands.load.report import BenchSummary, summarize
from deltaserve.commands.load.traffic import Conversation
from deltaserve.core.errors import DeltaserveError
from deltaserve.launch.compose import free_port

UNIFIED = ("--disaggregation-mode", "null")
_READY = "serving at "
_READY_WAIT_S = 1800.0
"""As `--start-timeout-s` has it; a part has a limit of its own."""
_STOP_WAIT_S = 20.0
_ANSWER_WAIT_S = 300.0
_LEAD_S = 0.2
"""The client processes begin together, so long after they were told when."""


class ServerFailed(DeltaserveError):
    """The server did not start, or ended."""


@dataclass(frozen=True, slots=True)
class ServedUrl:
    """A server that is ready."""

    url: str
    ready_s: float
    log: Path


@contextmanager
def serving(model: Path, flags: Sequence[str], folder: Path) -> Iterator[ServedUrl]:
    """`deltaserve serve` for as long as the context lasts. Raises ServerFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    log, url_port = folder / "serve.log", free_port()
    command = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(model), "--port", str(url_port)]
    command += ["--log-dir", str(folder), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        began = time.monotonic()
        while _READY not in log.read_text():
            if process.poll() is not None or time.monotonic() - began > _READY_WAIT_S:
                raise ServerFailed(f"the server did not get ready: {last_words(folder)}")
            time.sleep(0.02)
        yield ServedUrl(f"http://127.0.0.1:{url_port}", time.monotonic() - began, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end when they see that it is gone
            process.wait()


def last_words(folder: Path) -> str:
    """The last line of a server's logs that says what is wrong, or the last line of all."""
    lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    telling = [line for line in lines if any(word in line for word in ("ERROR", "CRITICAL", "Error", "error"))]
    return (telling or lines or ["nothing in its logs"])[-1].strip()[:300]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one client process sends."""

    url: str
    conversations: tuple[Conversation, ...]
    at_once: int | None
    extra: Mapping[str, object]
    begin_at: float
    """By the clock of the machine."""


class Clients:
    """Client processes. Use it as a context."""

    def __init__(self, num_processes: int | None = None) -> None:
        self._count = num_processes or max(2, min(6, (os.cpu_count() or 2) // 3))
        self._pool: Pool = multiprocessing.get_context("spawn").Pool(self._count)
        self._ready = self._pool.map_async(_wait, [0.05] * self._count, chunksize=1)
        """Over when all of them have imported what they need: they do while a server starts."""

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def measure(
        self,
        served: ServedUrl,
        conversations: Sequence[Conversation],
        at_once: int | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Measurement:
        """Requests are dealt out in turn. `at_once`: requests in flight, of all processes together."""
        self._ready.wait()
        count = min(self._count, len(conversations), at_once or len(conversations))
        begin_at = time.time() + _LEAD_S
        parts = []
        for number in range(count):
            most = None if at_once is None else (at_once + number) // count
            dealt = tuple(conversations[number::count])
            parts.append(_Part(served.url, dealt, most, extra or {}, begin_at))
        return _together(self._pool.map(_send, parts, chunksize=1))

    def summary(
        self, served: ServedUrl, conversations: Sequence[Conversation], at_once: int | None = None, **extra: object
    ) -> BenchSummary:
        return summarize(self.measure(served, conversations, at_once, extra))


def _wait(seconds: float) -> None:
    time.sleep(seconds)


def _send(part: _Part) -> tuple[float, Measurement]:
    """In a client process. Returns when it began, and what came of it."""
    return asyncio.run(_send_all(part))


async def _send_all(part: _Part) -> tuple[float, Measurement]:
    timeout = httpx.Timeout(_ANSWER_WAIT_S, pool=None)
    async with async_http_client(part.url, timeout) as http:
        dialect = ServerDialect(str((await listed_models(http))[0]["id"]), {**LENIENT, **part.extra})
        await asyncio.sleep(part.begin_at - time.time())
        began = time.time()
        load = Load([0.0] * len(part.conversations), part.at_once)
        return began, await Client(http, dialect).measure(part.conversations, load)


def _together(parts: Sequence[tuple[float, Measurement]]) -> Measurement:
    """What all processes measured, with one beginning."""
    first = min(began for began, _ in parts)
    records = [
        replace(record, sent_s=record.sent_s + began - first) for began, part in parts for record in part.records
    ]
    begin = min(record.sent_s for record in records)
    duration_s = max(record.sent_s + record.e2e_s for record in records) - begin
    return Measurement(tuple(records), duration_s, tuple(lag for _, part in parts for lag in part.lags_s))


def counted_bytes(url: str) -> MovedBytes | None:
    """What the server's workers have moved, once that stands still."""

    async def look() -> MovedBytes | None:
        async with async_http_client(url, _ANSWER_WAIT_S) as http:
            return await settled_bytes(http, url)

    return asyncio.run(look())


def refused(measurement: Measurement) -> int:
    """Requests that the server did not take."""
    errors = [record.error or "" for record in measurement.records]
    return sum("HTTP 429" in error or "HTTP 503" in error for error in errors)
