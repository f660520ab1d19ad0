"""A process with one transport that does as it is told: one JSON command per line in, one JSON answer per line out.

    puppet.py NAME BOOT NUM_BYTES FOLDER MEMORY        over the local transport; nixl_puppet.py: over NIXL

Its one region is filled with a byte on command and compared with a snapshot, so a test can ask which bytes changed and
when.
"""

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import RemoteRank, RemoteRegion, Transport, TransportError, WriteId, WriteState
from deltaserve.transports.local.transport import LocalTransport
from tests.transports.children.puppet_memory import MEMORY, PuppetMemory

REGION = RegionId(0)


class Puppet:
    """Public methods without underscore are the commands; arguments and answers are JSON values."""

    def __init__(self, memory: PuppetMemory, transport: Transport) -> None:
        self._memory = memory
        self._bytes = memory.bytes
        self._before = self._bytes + 0  # a copy
        self._transport = transport
        region = Region(REGION, memory.base, len(self._bytes), memory.device, memory.file)
        self._transport.register(region)
        self._peers: set[PeerName] = set()

    # ------------------------------------------------ the seam

    def open(self, peer: str) -> dict[str, Any]:
        """This side as the peer must know it."""
        metadata = self._transport.open(PeerName(peer))
        self._peers.add(PeerName(peer))
        return {"metadata": metadata.hex(), "base": self._memory.base, "num_bytes": len(self._bytes)}

    def attach(self, peer: str, other: dict[str, Any]) -> None:
        region = RemoteRegion(REGION, other["base"], other["num_bytes"], self._memory.device)
        self._transport.attach(PeerName(peer), [RemoteRank(bytes.fromhex(other["metadata"]), (region,))])

    def write(self, peer: str, offset: int, num_bytes: int, pieces: int = 1) -> int | None:
        """The same range on both sides, cut into pieces; None when the transport refused."""
        size = num_bytes // pieces
        spans = [Span(REGION, offset + i * size, size) for i in range(pieces)]
        try:
            return self._transport.write(PeerName(peer), [Copy(span, span) for span in spans], b"landed %d" % offset)
        except TransportError:
            return None

    def flood(self, peer: str, num_bytes: int, pieces: int, rounds: int) -> int:
        """Write again and again until refused, the two halves of the region in turn; how many writes were posted."""
        half, size = len(self._bytes) // 2, num_bytes // pieces
        self._bytes[:half], self._bytes[half:] = 1, 2
        for turn in range(rounds):
            sources = [Span(REGION, half * (turn % 2) + i * size, size) for i in range(pieces)]
            copies = [Copy(span, span._replace(offset=span.offset % half)) for span in sources]
            try:
                self._transport.write(PeerName(peer), copies, None)
            except TransportError:
                return turn
        return rounds

    def poll(self, write: int) -> str:
        return self._transport.poll(WriteId(write)).value

    def finish(self, write: int, give_up_s: float = 60.0) -> str:
        """Poll to the end; `pending` when there was none."""
        give_up = time.monotonic() + give_up_s
        while (state := self._transport.poll(WriteId(write))) is WriteState.PENDING and time.monotonic() < give_up:
            time.sleep(0.001)
        return state.value

    def notifications(self) -> list[str]:
        return [message.decode() for _, message, _ in self._transport.notifications()]

    def listen(self, count: int, give_up_s: float = 60.0) -> list[str]:
        """Poll until `count` notifications are there."""
        give_up = time.monotonic() + give_up_s
        heard: list[str] = []
        while len(heard) < count and time.monotonic() < give_up:
            heard += self.notifications()
            time.sleep(0.001)
        return heard

    def fence(self, peer: str) -> str:
        return self._transport.fence(PeerName(peer)).value

    def close(self) -> None:
        self._transport.close()

    def reset(self) -> None:
        """As new, but for the age of the process: no endpoints, empty memory."""
        for peer in self._peers:
            self._transport.fence(peer)
        self._peers.clear()
        self._bytes[:] = 0
        self._before[:] = 0

    # ------------------------------------------------ its memory

    def settle_memory(self) -> None:
        """What the memory was filled with is there for everybody."""
        self._memory.settle()

    def fill(self, value: int) -> None:
        self._bytes[:] = value

    def snapshot(self) -> None:
        self._before[:] = self._bytes

    def num_changed(self, end: int | None = None) -> int:
        """Bytes below `end` (None: all) that differ from the snapshot."""
        return self._memory.num_changed(self._before, end)

    def count(self, value: int) -> int:
        return self._memory.num_of(value)

    def settle(self, polls: bool, end: int | None = None, give_up_s: float = 20.0) -> int:
        """Wait until the number of changed bytes stands still, polling the transport meanwhile if asked to.

        Only bytes below `end` are looked at, if given.
        """
        give_up, still, last = time.monotonic() + give_up_s, 0, -1
        while still < 10 and time.monotonic() < give_up:
            if polls:
                self._transport.notifications()
            time.sleep(0.06)
            changed = self.num_changed(end)
            still = still + 1 if changed == last else 0
            last = changed
        return last

    # ------------------------------------------------ its process

    def cpu_while_idle(self, seconds: float) -> float:
        """CPU seconds this process used while it slept."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def listeners(self) -> list[str]:
        """Local addresses of this process' listening TCP sockets, hex as the kernel prints them."""
        ours = {os.readlink(f"/proc/self/fd/{fd}") for fd in _socket_fds()}
        found = []
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            with open(table) as lines:
                for fields in map(str.split, list(lines)[1:]):
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                        found.append(fields[1].split(":")[0])
        return found

    def cut(self) -> int:
        """Break every established TCP connection of this process; how many there were."""
        cut = 0
        for fd in _socket_fds():
            try:
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family == socket.AF_INET and sock.getpeername():
                        sock.shutdown(socket.SHUT_RDWR)
                        cut += 1
            except OSError:  # a listener, or closed by the library meanwhile
                continue
        return cut

    def exit(self) -> None:
        """End without `close`: what the adapter's last net must survive."""
        raise SystemExit(0)


def _socket_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                fds.append(int(name))
        except OSError:
            continue
    return fds


def perform(make: Callable[[], Puppet]) -> None:
    """Do what is said on stdin, to its end."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # UCX logs to stdout
        puppet = make()
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(puppet, command.pop("do"))(**command)
            puppet.settle_memory()
            print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    _, _, num_bytes, folder, kind = sys.argv[1:]
    memory = MEMORY[kind](int(num_bytes))
    perform(lambda: Puppet(memory, LocalTransport(Path(folder), memory.access)))


if __name__ == "__main__":
    main()
