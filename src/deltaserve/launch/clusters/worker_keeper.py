"""Keeps one worker running on this node, and tells who asks how it is: the part of a launcher that needs no library of
its own. Tokens and pages never come by here: the worker has links and transfers of its own."""

import logging
import secrets
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from deltaserve.core.errors import ConfigError, one_line
from deltaserve.core.ids import Role
from deltaserve.launch.clusters.worker_plan import PlannedWorker
from deltaserve.launch.restarts import RestartPolicy
from deltaserve.launch.serve import keep_logs, open_log_dir, require_free_port
from deltaserve.launch.supervisor import Supervisor, SupervisorOptions
from deltaserve.process.children.child import ChildSpec, Kind
from deltaserve.process.children.child_events import AllReady, ChildEvent, Ended, IsReady, Stopping
from deltaserve.process.children.exits import Exit
from deltaserve.process.children.private_folder import private_folder

_log = logging.getLogger(__name__)

_PORT_WAIT_S = 30.0
"""How long the port may be taken by a worker that is just ending here."""
_PORT_POLL_S = 0.2
_MOST_LINES = 200
"""Lines kept for who asks; of more that nobody asked for, the last ones."""


class KeeperReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker is."""

    life: str
    """One life of the keeper: another one after each start on another node."""
    host: str
    is_ready: bool = False
    lines: tuple[str, ...] = ()
    """What there is to tell a user, behind the first `num_seen`."""
    num_lines: int = 0
    exit_code: int | None = None
    """The worker is not started again. None: it runs, or will."""


class WorkerKeeper:
    """One worker on the node of this address, from now on."""

    def __init__(self, worker: PlannedWorker, host: str) -> None:
        self._worker, self._host = worker, host
        self._life = secrets.token_hex(4)
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._num_lines = 0
        self._is_ready = False
        self._exit_code: int | None = None
        self._is_stopping = threading.Event()
        self._supervisor: Supervisor | None = None
        self._thread = threading.Thread(target=self._keep, name=worker.name, daemon=True)
        self._thread.start()

    def report(self, num_seen: int) -> KeeperReport:
        """How the worker is. `num_seen`: lines of this keeper that were told already."""
        with self._lock:
            num_new = min(self._num_lines - num_seen, len(self._lines))
            return KeeperReport(
                life=self._life,
                host=self._host,
                is_ready=self._is_ready,
                lines=tuple(self._lines)[len(self._lines) - num_new :],
                num_lines=self._num_lines,
                exit_code=self._exit_code,
            )

    def stop(self) -> None:
        """Have the worker drain and end. Again: at once."""
        with self._lock:
            self._is_stopping.set()
            if self._supervisor is not None:
                self._supervisor.stop()

    def wait(self, timeout_s: float) -> bool:
        """Whether the worker has ended for good within that time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ its thread

    def _keep(self) -> None:
        try:
            code = self._keep_in_folder()
        except ConfigError as error:
            self._say(f"{self._worker.name}: {one_line(error)}")
            code = Exit.CONFIG
        except OSError as error:
            self._say(f"{self._worker.name}: {error}")
            code = Exit.FAILED
        except Exception as error:  # whoever asks must not take it for one that runs
            _log.exception("the keeper of %s failed", self._worker.name)
            self._say(f"{self._worker.name}: {type(error).__name__}: {one_line(error)}")
            code = Exit.FAILED
        with self._lock:
            self._is_ready, self._exit_code = False, int(code)

    def _keep_in_folder(self) -> Exit:
        worker = self._worker
        self._wait_for_port()
        with private_folder() as folder:
            log_dir = folder if worker.log_dir is None else open_log_dir(Path(worker.log_dir))
            options = SupervisorOptions(
                log_dir=None if worker.shows_log else log_dir,
                grace_s=worker.grace_s,
                restarts=RestartPolicy(start_timeout_s=worker.start_timeout_s),
            )
            kind = Kind.PREFILL if worker.role is Role.PREFILL else Kind.DECODE
            argv = (sys.executable, "-m", "deltaserve", *worker.argv(self._host))
            supervisor = Supervisor([ChildSpec(worker.name, argv, kind)], options, self._on_event)
            with self._lock:
                self._supervisor = supervisor
                if self._is_stopping.is_set():
                    return Exit.OK
            code = supervisor.keep()
            if code is not Exit.OK and options.log_dir is folder:
                self._say(f"{worker.name}, on {self._host}: {keep_logs(folder)}")
            return code

    def _wait_for_port(self) -> None:
        """Raises ConfigError when it stays taken."""
        deadline = time.monotonic() + _PORT_WAIT_S
        while not self._is_stopping.is_set():
            try:
                require_free_port("--disaggregation-bootstrap-port", self._host, self._worker.port)
                return
            except ConfigError:
                if time.monotonic() >= deadline:
                    raise
            self._is_stopping.wait(_PORT_POLL_S)

    def _on_event(self, event: ChildEvent) -> None:
        match event:
            case IsReady():
                self._set_ready(True)
            case Ended():
                self._set_ready(False)
        if not isinstance(event, AllReady | Stopping):  # of one worker, who starts all of them tells that
            self._say(str(event))

    def _set_ready(self, is_ready: bool) -> None:
        with self._lock:
            self._is_ready = is_ready

    def _say(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)
            self._num_lines += 1
