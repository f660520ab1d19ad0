"""A supervisor in a process of its own, and what it says."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltaserve.launch.restarts import RestartPolicy
from deltaserve.process.children.child_events import ChildStarts
from deltaserve.process.children.title import ROOM
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).resolve().parent / "programs"
CHILD = "tests.process.worker.programs.child"

_OF_RESTARTS = {field.name for field in dataclasses.fields(RestartPolicy)}

Said = dict[str, Any]
_END = "the end"
"""Behind everything that a supervisor said."""


def child(name: str, behaviour: str, kind: str = "DECODE") -> Said:
    return {"name": name, "kind": kind, "argv": [sys.executable, "-m", CHILD, behaviour], "may_be_forked": True}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}


class Server:
    """Talks to a running supervisor."""

    def __init__(self, folder: Path, children: list[Said], preload: str | None = None, **options: object) -> None:
        """`preload`: behaviour of the process that children are forked from, see programs/preload.py; None: there is
        none."""
        plan = folder / "plan.json"
        restarts = {name: options.pop(name) for name in _OF_RESTARTS & options.keys()}
        argv = [] if preload is None else [sys.executable, str(PROGRAMS / "preload.py"), preload, ROOM]
        plan.write_text(json.dumps({"children": children, "options": options, "restarts": restarts, "preload": argv}))
        self.folder = folder
        self.pids: dict[str, list[int]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "supervise.py"), str(plan)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._said: queue.SimpleQueue[tuple[str, Said]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, fields = json.loads(line)
            if what == ChildStarts.__name__:
                self.pids.setdefault(fields["name"], []).append(fields["pid"])
            self._said.put((what, fields))
        self._said.put((_END, {}))

    def wait_for(self, what: str, name: str | None = None) -> Said:
        """The next notice of that type (and child); earlier ones are passed over. Its end fails at once."""
        deadline = time.monotonic() + PATIENCE_S
        passed = []
        while True:
            found, fields = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            if found == what and name in (None, fields.get("name")):
                return fields
            passed.append(found if name is None else f"{found} {fields.get('name')} {fields.get('reason', '')}")
            assert found != _END, f"no {what} {name or ''} came before the supervisor's end: {passed}"

    def wait_for_log(self, name: str, text: str) -> str:
        """The child's output once it holds `text`."""
        path = self.folder / f"{name}.log"
        deadline = time.monotonic() + PATIENCE_S
        while text not in (log := path.read_text() if path.exists() else ""):
            assert time.monotonic() < deadline, f"{text!r} not in: {log}"
            time.sleep(0.01)
        return log

    def pid(self, name: str) -> int:
        """Process id of the latest start of `name`."""
        return self.pids[name][-1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the supervisor; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        """Kill the supervisor; its children end with it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in (pid for pids in self.pids.values() for pid in pids):
            wait_until_gone(pid)


@contextlib.contextmanager
def running(folder: Path, children: list[Said], preload: str | None = None, **options: object) -> Iterator[Server]:
    server = Server(folder, children, preload, **options)
    try:
        yield server
    finally:
        server.clean_up()


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_alive(pid))
