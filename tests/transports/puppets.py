"""The test's end of `children/puppet.py`: start, command, stop and kill real worker processes."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.transports.nixl.options import NixlOptions, environment
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = Path(__file__).parent / "children"
NIXL_OPTIONS = NixlOptions(tls="tcp,self", net_devices="lo")
POLLING_ONLY = NixlOptions(NIXL_OPTIONS.tls, NIXL_OPTIONS.net_devices, progress_delay_us=0)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of a puppet with a local transport."""

    folder: Path
    """Where puppets meet."""
    memory: str = "host"
    """What their regions are: see children/puppet_memory.py."""


Options = NixlOptions | LocalOptions


class Puppet:
    """One child process. Made by a `Troupe`, which never lets it outlive its tests."""

    def __init__(self, name: str, num_bytes: int, options: Options = NIXL_OPTIONS, boot: int = 1) -> None:
        self.name = name
        ucx: dict[str, str] = {}
        args: list[str | int] = [name, boot, num_bytes]
        if isinstance(options, NixlOptions):
            script = CHILDREN / "nixl_puppet.py"
            args += [options.tls, options.net_devices, options.progress_delay_us]
            ucx = environment(options)
        else:
            script = CHILDREN / "puppet.py"
            args += [str(options.folder), options.memory]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, str(script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library tells of every disconnect
            env={**os.environ, **ucx, "PYTHONPATH": path},
        )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._unread = b""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def do(self, command: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.start(command, **arguments)
        return self.answer()

    def start(self, command: str, **arguments: Any) -> None:
        self._stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self._stdin.flush()

    def answer(self) -> Any:
        give_up = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            assert self._selector.select(give_up - time.monotonic()), f"{self.name} does not answer"
            part = os.read(self._stdout.fileno(), 1 << 16)
            assert part, f"{self.name} ended with {self._process.wait()}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL and reap; nothing may be asked of it afterwards. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._stdin.close()
        self._stdout.close()

    def stop(self) -> None:
        """SIGSTOP, and wait until the kernel has really stopped it."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def exit_code(self) -> int:
        """Tell it to end without closing its transport, and wait. Negative: killed by that signal."""
        self.start("exit")
        code = self._process.wait(PATIENCE_S)
        self.kill()
        return code


class Troupe:
    """Puppets that serve many tests, because starting one takes longer than most scenes. A dead one is replaced."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._puppets: dict[tuple[str, Options], Puppet] = {}
        self._started = 0

    def call(self, name: str, options: Options = NIXL_OPTIONS) -> Puppet:
        """A puppet without endpoints and with empty memory; each process of a name has its own boot."""
        puppet = self._puppets.get((name, options))
        if puppet is None or not puppet.is_alive:
            self._started += 1
            puppet = self._puppets[name, options] = Puppet(name, self._num_bytes, options, boot=self._started)
        puppet.do("reset")
        return puppet

    def dismiss(self) -> None:
        for puppet in self._puppets.values():
            puppet.kill()


def join(a: Puppet, b: Puppet) -> None:
    """Open and attach both ends, and warm the connection up: its handshake needs both sides' progress."""
    of_a, of_b = a.do("open", peer=b.name), b.do("open", peer=a.name)
    a.do("attach", peer=b.name, other=of_b)
    b.do("attach", peer=a.name, other=of_a)
    for writer, reader in ((a, b), (b, a)):
        write = writer.do("write", peer=reader.name, offset=0, num_bytes=1)
        reader.start("listen", count=1)
        state, heard = writer.do("finish", write=write), reader.answer()
        assert (state, heard) == ("done", ["landed 0"]), f"{writer.name} to {reader.name}: {state}, {heard}"
