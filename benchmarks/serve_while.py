"""A server for as long as some work takes: started, used from a thread, ended."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Thread
from typing import Generic, TypeVar

from deltaserve.core.errors import ConfigError
from deltaserve.launch.serve import Deployment, compose, supervisor_options
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child_events import AllReady, ChildEvent, Ended, GivenUp, Stopping
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.private_folder import private_folder
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import Settings

_LAST_WORDS_S = 10.0

T = TypeVar("T")
Work = Callable[[str, Event], T]
"""(base URL, set when the user asks to end) -> a result."""


class ServerLostError(Exception):
    """The server could not be kept running."""


def serve_while(
    settings: Settings, adjust: Callable[[WorkerSpec], WorkerSpec], work: Work[T], say: Callable[[str], None]
) -> T:
    """Start a server, do the work in a thread once it is ready, end the server; the work's result.

    Call it in the main thread. No process outlives the call. Raises what the work raises; KeyboardInterrupt when the
    user ended the server before the work began; ServerLostError; ConfigError.
    """
    with private_folder(settings.process.state_dir) as folder:
        options = supervisor_options(settings, folder)
        return _Run(compose(settings, folder, adjust), options, work, say).result()


class _Run(Generic[T]):
    """One server and the thread that talks to it."""

    def __init__(
        self, deployment: Deployment, options: SupervisorOptions, work: Work[T], say: Callable[[str], None]
    ) -> None:
        self._url = deployment.base_url
        self._work = work
        self._say = say
        self._stopping = Event()
        self._outcome: Future[T] = Future()
        self._thread = Thread(target=self._perform, name="work", daemon=True)
        self._given_up: str | None = None
        self._supervisor = Supervisor(deployment.children, options, self._hear)

    def result(self) -> T:
        code = self._supervisor.run()
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S)
        if self._given_up is not None:
            raise (ConfigError if code is Exit.CONFIG else ServerLostError)(self._given_up)
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

    def _hear(self, event: ChildEvent) -> None:
        match event:
            case AllReady():
                if self._thread.ident is None:
                    self._thread.start()
            case Stopping():
                self._stopping.set()
            case GivenUp(reason):
                self._given_up = reason
            case Ended(tail=tail) if tail:
                self._say(str(event))
            case _:
                pass
