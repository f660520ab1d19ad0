"""Echo workers as processes, and a front that talks to them."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deltaserve.core.ids import PeerName, Role
from deltaserve.core.layout.dtype import DType
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.wire.messages import Envelope, Finished, PeerAddress, Submit, Tokens
from deltaserve.process.links.links import Links
from deltaserve.process.worker.worker_spec import WorkerSpec, write_spec
from tests.patience import PATIENCE_S
from tests.process.worker.server import PROGRAMS, environment

SECRET = b"0123456789abcdef" * 3
NO_FILES = "no more files may be open: raise what a process may have (ulimit -n) ([Errno 24] Too many open files)"
"""What a worker says that has no descriptor left."""
ECHO = (sys.executable, str(PROGRAMS / "echo_worker.py"))


def write_worker(folder: Path, model: str = "echo", name: str = "decode-0", **changes: Any) -> Path:
    """Spec file of an echo worker; `model` says what goes wrong."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    fields: dict[str, Any] = {
        "name": name,
        "role": Role.DECODE,
        "model_path": model,
        "device": "cpu",
        "dtype": DType.FLOAT32,
        "kv_dtype": DType.FLOAT32,
        "page_size": 16,
        "num_pages": (4,),
        "max_running_requests": 1,
        "max_context_len": 64,
        "secret_path": str(secret),
        "transport": "local",
        **changes,
    }
    path = folder / f"{name}.json"
    write_spec(WorkerSpec(**fields), path)
    return path


class Worker:
    """A worker nobody supervises, or another process of one."""

    def __init__(self, folder: Path, model: str, program: Sequence[str] = ECHO, **changes: Any) -> None:
        spec = write_worker(folder, model, **changes)
        self._log_path = folder / "worker.log"
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen([*program, str(spec)], stderr=log, env=environment())

    def log(self) -> str:
        return self._log_path.read_text()

    def wait_for_log(self, text: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log():
            assert time.monotonic() < deadline, f"{text!r} not in: {self.log()}"
            time.sleep(0.01)
        return self.log()

    def port(self) -> int:
        """Where it listens, once it does."""
        ready = next(line for line in self.wait_for_log(", boot ").splitlines() if "ready on" in line)
        return int(ready.split("ready on ")[1].split(",")[0].rpartition(":")[2])

    def code(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.contextmanager
def working(folder: Path, model: str = "echo", **changes: Any) -> Iterator[Worker]:
    worker = Worker(folder, model, **changes)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


class Front:
    """Asks one worker."""

    def __init__(self, links: Links, port: int, name: str = "decode-0") -> None:
        self._links = links
        self._name = PeerName(name)
        self._held: list[Envelope] = []
        links.dial(PeerAddress(name=name, url=f"tcp://127.0.0.1:{port}"))

    def submit(self, token: int) -> None:
        submit = Submit(
            room=bytes([token]),
            epoch=1,
            prompt=pack_u32([1, token]),
            prompt_len=2,
            keys=b"",
            namespace="",
            sampling=SamplingParams(max_tokens=1, seed=0),
            prefill=None,
            remaining_ms=1000,
        )
        self._links.send(self._name, Envelope(src="front", src_boot=1, dst_boot=None, body=submit))

    def answer(self) -> tuple[int, ...]:
        """Tokens of the next room that finishes."""
        tokens: tuple[int, ...] = ()
        while True:
            match self.hear().body:
                case Tokens(runs=runs):
                    tokens = unpack_u32(runs[0].tokens)
                case Finished():
                    return tokens

    def hear(self) -> Envelope:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if self._held:
                return self._held.pop(0)
            for socket in self._links.wait(0.2):
                self._held += self._links.receive(socket)
            assert time.monotonic() < deadline, "nothing heard"
