"""A process with one transport that does as it is told: one JSON command per line in, one JSON answer per line out.

    puppet.py NAME BOOT NUM_BYTES nixl TLS NET_DEVICES PROGRESS_DELAY_US
    puppet.py NAME BOOT NUM_BYTES local FOLDER

Its one region is filled with a byte on command and compared with a snapshot, so a test can ask which bytes changed and
when. Commands starting with `raw_` reach past the adapter on purpose: they do what the adapter must never do, to show
what the library (NIXL) makes of it.
"""

import json
import mmap
import os
import socket
import stat
import sys
import time
from ctypes import addressof, c_char
from pathlib import Path
from typing import Any

import numpy as np
from nixl_cu12 import _bindings as lib

from deltaserve.core.extents import Copy, Region, Span
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import RemoteRank, RemoteRegion, TransportError, WriteId, WriteState
from deltaserve.transports.local.memory import sealed_file
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.nixl.options import NixlOptions
from deltaserve.transports.nixl.transport import NixlTransport

REGION = RegionId(0)


class Puppet:
    """Public methods without underscore are the commands; arguments and answers are JSON values."""

    def __init__(self, num_bytes: int, transport: LocalTransport | NixlTransport) -> None:
        file = sealed_file(num_bytes, "puppet") if isinstance(transport, LocalTransport) else None
        self._memory = mmap.mmap(-1 if file is None else file, num_bytes)
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._memory, dtype=np.uint8)  # [num_bytes]
        self._before = self._bytes.copy()  # [num_bytes]
        self._base = addressof(c_char.from_buffer(self._memory))
        self._transport = transport
        self._transport.register(Region(REGION, self._base, num_bytes, "cpu", file))

    # ------------------------------------------------ the seam

    def open(self, peer: str) -> dict[str, Any]:
        """This side as the peer must know it."""
        metadata = self._transport.open(PeerName(peer))
        return {"metadata": metadata.hex(), "base": self._base, "num_bytes": len(self._memory)}

    def attach(self, peer: str, other: dict[str, Any]) -> None:
        region = RemoteRegion(REGION, other["base"], other["num_bytes"], "cpu")
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
        half, size = len(self._memory) // 2, num_bytes // pieces
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
        for peer in list(self._transport._endpoints):
            self._transport.fence(peer)
        self._bytes[:] = self._before[:] = 0

    # ------------------------------------------------ its memory

    def fill(self, value: int) -> None:
        self._bytes[:] = value

    def snapshot(self) -> None:
        self._before[:] = self._bytes

    def num_changed(self, end: int | None = None) -> int:
        """Bytes below `end` (None: all) that differ from the snapshot."""
        return int(np.count_nonzero(self._bytes[:end] != self._before[:end]))

    def count(self, value: int) -> int:
        return int(np.count_nonzero(self._bytes == value))

    def settle(self, polls: bool, end: int | None = None, give_up_s: float = 20.0) -> int:
        """Wait until the number of changed bytes stands still, polling the transport meanwhile if asked to.

        Only bytes below `end` are looked at, if given.
        """
        give_up, still, last = time.monotonic() + give_up_s, 0, -1
        while still < 10 and time.monotonic() < give_up:
            if polls:
                self._transport.notifications()
            time.sleep(0.02)
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

    # ------------------------------------------------ what the adapter never does

    def _nixl(self) -> NixlTransport:
        assert isinstance(self._transport, NixlTransport)
        return self._transport

    def raw_release(self, write: int) -> str:
        peer, posted = self._nixl()._writes[WriteId(write)]
        handle, posted.handle = posted.handle, None  # a second release at the fence would be a use after free
        assert handle is not None
        return str(self._nixl()._endpoints[peer]._live().releaseXferReq(handle))

    def raw_forget_peer(self, peer: str) -> str:
        endpoint = self._nixl()._endpoints[PeerName(peer)]
        return str(endpoint._live().invalidateRemoteMD(endpoint.ranks[0].agent))

    def raw_deregister(self, peer: str) -> str:
        endpoint = self._nixl()._endpoints[PeerName(peer)]
        descriptors = [(self._base, len(self._memory), 0, "")]
        dlist = lib.nixlRegDList(lib.DRAM_SEG, descriptors)
        return str(endpoint._live().deregisterMem(dlist, [endpoint._backend]))


def _socket_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                fds.append(int(name))
        except OSError:
            continue
    return fds


def make_transport(name: str, boot: int, kind: str, options: list[str]) -> LocalTransport | NixlTransport:
    if kind == "local":
        return LocalTransport(Path(options[0]))
    tls, net_devices, delay_us = options
    return NixlTransport(PeerName(name), Boot(boot), NixlOptions(tls, net_devices, int(delay_us)))


def main() -> None:
    name, boot, num_bytes, kind, *options = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # UCX logs to stdout
        puppet = Puppet(int(num_bytes), make_transport(name, int(boot), kind, options))
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(puppet, command.pop("do"))(**command)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
