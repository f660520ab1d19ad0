"""A front over the oracle engine in a process of its own: `python -m tests.server.child FOLDER LISTENERS [OPEN_FILES]`.

Prints the ports of its listeners, API and admin routes, when it listens.
"""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltaserve.process.front.event_loop import loop_factory
from deltaserve.server.app import create_app
from deltaserve.server.heap import return_large_blocks
from deltaserve.server.listening import Listening, serve
from deltaserve.server.settings import HttpLimits, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S, killed_if_late
from tests.server.oracle import OracleEngine

NUM_LATER_FILES = 16
"""Opened once it listens, where descriptors are few: a front's links to its workers are."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Child:
    """A running one."""

    process: "subprocess.Popen[str]"
    port: int
    admin_port: int | None
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / (1 << 20)

    def peak_mib(self) -> float:
        """The most that was resident since it began."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


@contextmanager
def child(model_folder: Path, folder: Path, num_files: int | None = None, num_listeners: int = 1) -> Iterator[Child]:
    """One that listens, killed afterwards. `num_files`: descriptors it may open. Two listeners: one is of the admin
    routes."""
    argv = [
        sys.executable,
        "-m",
        "tests.server.child",
        str(model_folder),
        str(num_listeners),
        *([] if num_files is None else [str(num_files)]),
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    log = folder / "stderr.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, env=env, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        with killed_if_late(process):
            line = process.stdout.readline()
        assert line, log.read_text()
        port, *admin = map(int, line.split())
        yield Child(process, port, admin[0] if admin else None, log)
    finally:
        process.kill()
        process.communicate()


async def _main(model_folder: Path, num_listeners: int, num_later_files: int) -> None:
    engine = OracleEngine()
    limits = HttpLimits(header_timeout_s=PATIENCE_S)  # a test says itself how long its connections stay
    settings = ServerSettings("tiny", port=0, admin_port=None if num_listeners == 1 else 0, http=limits)
    app = create_app(engine, TextCodec.load(model_folder), settings)

    later = contextlib.ExitStack()

    def tell(where: Listening) -> None:
        for _ in range(num_later_files):
            later.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert where.api is not None
        print(where.api[1], *(() if where.admin is None else where.admin[1:]), flush=True)

    async def forget() -> None:
        while True:
            await asyncio.sleep(0.1)
            for kept in (engine.opened, engine.ended, engine.cancelled):
                kept.clear()

    forgetting = asyncio.create_task(forget())
    with later, contextlib.suppress(asyncio.CancelledError):
        await serve(app, settings, stop=asyncio.Event(), hurry=asyncio.Event(), on_listening=tell)
    forgetting.cancel()


if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
    return_large_blocks()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_main(Path(sys.argv[1]), int(sys.argv[2]), NUM_LATER_FILES if len(sys.argv) > 3 else 0))
