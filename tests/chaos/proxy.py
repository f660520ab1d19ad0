"""A TCP proxy that misbehaves: it stands on a worker's link port and does to bytes what networks do.

What it holds back is delivered late and in order, as TCP does after a partition. Bytes are never dropped out of the
middle of a stream; they are late, changed, or the connection is reset.
"""

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

_CHUNK_BYTES = 1 << 16
_LOOK_S = 0.02
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to the bytes of all connections of a proxy."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    corrupt_share: float = 0.0
    """Share of the chunks that are corrupted; one bit of such a chunk is flipped."""
    holds_up: bool = False
    """Bytes to the worker wait."""
    holds_down: bool = False
    """Bytes from the worker wait."""
    refuses: bool = False
    """New connections are reset."""


FAIR = Weather()


class Proxy:
    """Listens on a port of its own and connects on to `target_port`, both on 127.0.0.1."""

    def __init__(self, target_port: int, draw: Random) -> None:
        self.weather = FAIR
        self._target_port = target_port
        self._draw = draw
        self._links: list[_Link] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def open(self) -> int:
        """Listen; the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        return self.port

    @property
    def port(self) -> int:
        """Precondition: it is open."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """No connection outlives it."""
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn of the loop

    def cut(self) -> int:
        """Reset all connections on both sides; how many there were."""
        links, self._links = self._links, []
        for link in links:
            link.reset()
        return len(links)

    def cut_one(self) -> int:
        """Reset one connection of all, so that one peer loses its link and the others do not."""
        if not self._links:
            return 0
        self._links.pop(self._draw.randrange(len(self._links))).reset()
        return 1

    def _accept(self, listener: socket.socket) -> None:
        """Accept by our own code, not by `asyncio.start_server`: that loses a connection which it has accepted and not
        yet told of when it is closed."""
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if self.weather.refuses:
            _reset(peer)
            return
        task = asyncio.create_task(self._serve(peer))
        self._tasks.add(task)

        def end(ended: asyncio.Task[None]) -> None:  # a task that is cancelled before its first step runs nothing
            self._tasks.discard(ended)
            _reset(peer)

        task.add_done_callback(end)

    async def _serve(self, peer: socket.socket) -> None:
        try:
            far = _Side(*await asyncio.open_connection("127.0.0.1", self._target_port))
        except OSError:  # the worker is not there
            return
        try:
            await self._join(_Side(*await asyncio.open_connection(sock=peer)), far)
        finally:
            far.reset()

    async def _join(self, near: "_Side", far: "_Side") -> None:
        """Until one of them is reset; then both are."""
        link = _Link(near, far)
        self._links.append(link)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(near, far, lambda: self.weather.holds_up))
                pumps.create_task(self._pump(far, near, lambda: self.weather.holds_down))
        except* OSError:  # one side reset the connection: so does the other
            pass
        finally:
            if link in self._links:
                self._links.remove(link)
            link.reset()

    async def _pump(self, source: "_Side", target: "_Side", is_held: Callable[[], bool]) -> None:
        while data := await source.reader.read(_CHUNK_BYTES):
            while is_held():
                await asyncio.sleep(_LOOK_S)
            if self.weather.delay_s:
                await asyncio.sleep(self.weather.delay_s)
            if self.weather.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.weather.bytes_per_s)
            target.writer.write(self._weathered(data))
            await target.writer.drain()
        raise ConnectionResetError("one side is done")

    def _weathered(self, data: bytes) -> bytes:
        if self._draw.random() >= self.weather.corrupt_share:
            return data
        changed = bytearray(data)
        changed[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
        return bytes(changed)


def _reset(peer: socket.socket) -> None:
    """Nothing when it is closed already."""
    if peer.fileno() >= 0:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        peer.close()


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two sockets of a link."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """A connection from a peer, and ours to the worker."""

    near: _Side
    far: _Side

    def reset(self) -> None:
        for side in self:
            side.reset()

    def __iter__(self) -> Iterator[_Side]:
        return iter((self.near, self.far))
