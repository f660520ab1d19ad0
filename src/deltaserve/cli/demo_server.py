"""The demo's server: real processes on a small pool, its decode cache on or off, and work done while it serves."""

from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from threading import Event, Thread
from typing import Generic, TypeVar

import msgspec

from deltaserve.base.config import MemorySettings, ModelSettings, NetworkSettings, SchedulingSettings, Settings
from deltaserve.base.errors import ConfigError
from deltaserve.base.ids import Role
from deltaserve.cli.serve import Cluster, compose, private_folder
from deltaserve.engine.exits import Exit
from deltaserve.engine.happenings import AllReady, Ended, GivenUp, Happening, Stopping
from deltaserve.engine.spec import WorkerSpec
from deltaserve.engine.supervisor import Supervisor, SupervisorOptions

DECODE = "decode-0"
PAGE_SIZE = 16
PREFILL_PAGES = 1024
DECODE_PAGES = 256
"""Decode's pool, small on purpose: six private copies of a document of 600 tokens fill it."""
_CONTEXT_LEN = 2048
_RESERVED_TOKENS = 32
_HEARTBEAT_S = 0.1
_LAST_WORDS_S = 10.0

T = TypeVar("T")
Work = Callable[[str, Event], T]
"""(base URL, set when the user asks to end) -> a result."""


class DecodeCache(Enum):
    """Whether decode keeps and shares pages between requests. Prefill always does in the demo."""

    OFF = "off"
    ON = "on"


class DemoError(Exception):
    """The demo's server could not be kept running."""


def demo_settings(model: Path, port: int) -> Settings:
    """What `deltaserve serve MODEL --device cpu --page-size 16 ...` would be given."""
    return Settings(
        model=ModelSettings(model_path=str(model), device="cpu", context_length=_CONTEXT_LEN),
        memory=MemorySettings(page_size=PAGE_SIZE, num_pages=PREFILL_PAGES),
        scheduling=SchedulingSettings(num_reserved_decode_tokens=_RESERVED_TOKENS),
        network=NetworkSettings(port=port),
    )


def adjusted(cache: DecodeCache) -> Callable[[WorkerSpec], WorkerSpec]:
    """Decode alone gets the small pool and the cache in question; it tells its load often, for the table."""

    def adjust(spec: WorkerSpec) -> WorkerSpec:
        if spec.role is not Role.DECODE:
            return spec
        return msgspec.structs.replace(
            spec, num_pages=(DECODE_PAGES,), radix_cache=cache is DecodeCache.ON, heartbeat_s=_HEARTBEAT_S
        )

    return adjust


def serve_while(settings: Settings, cache: DecodeCache, work: Work[T], say: Callable[[str], None]) -> T:
    """Start a server, do the work in a thread once it is ready, end the server; the work's result.

    Call it in the main thread. No process outlives the call. Raises what the work raises; KeyboardInterrupt when the
    user ended the server before the work began; DemoError; ConfigError.
    """
    with private_folder() as folder:
        return _Run(compose(settings, folder, adjusted(cache)), folder, work, say).result()


class _Run(Generic[T]):
    """One server and the thread that talks to it."""

    def __init__(self, cluster: Cluster, folder: Path, work: Work[T], say: Callable[[str], None]) -> None:
        self._url = cluster.base_url
        self._work = work
        self._say = say
        self._stopping = Event()
        self._outcome: Future[T] = Future()
        self._thread = Thread(target=self._perform, name="demo", daemon=True)
        self._given_up: str | None = None
        self._supervisor = Supervisor(cluster.children, SupervisorOptions(log_dir=folder), self._hear)

    def result(self) -> T:
        code = self._supervisor.run()
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S)
        if self._given_up is not None:
            raise (ConfigError if code is Exit.CONFIG else DemoError)(self._given_up)
        if not self._outcome.done():
            raise KeyboardInterrupt
        return self._outcome.result()

    def _perform(self) -> None:
        try:
            self._outcome.set_result(self._work(self._url, self._stopping))
        except BaseException as error:
            self._outcome.set_exception(error)
        if not self._stopping.is_set():  # a second call would cut the drain short
            self._supervisor.stop()

    def _hear(self, happening: Happening) -> None:
        match happening:
            case AllReady():
                if self._thread.ident is None:
                    self._thread.start()
            case Stopping():
                self._stopping.set()
            case GivenUp(reason):
                self._given_up = reason
            case Ended(tail=tail) if tail:
                self._say(str(happening))
            case _:
                pass
