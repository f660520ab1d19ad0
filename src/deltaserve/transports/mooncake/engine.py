"""One Mooncake engine = one peer = one process: python -m deltaserve.transports.mooncake.engine DESCRIPTOR

It does what the transport in the parent process tells it over the inherited socket, maps the regions it is given, and
ends when that socket does. Killing it is the fence, so it holds nothing that anybody else needs.
"""

import os
import selectors
import signal
import socket
import sys
import threading
from array import array
from contextlib import suppress
from ctypes import addressof, c_char
from mmap import MAP_SHARED, mmap
from queue import SimpleQueue
from typing import Any, NoReturn

from deltaserve.transports.mooncake.frames import (
    AttachEngines,
    EngineCard,
    EngineFailed,
    EngineReady,
    EngineWithoutLibrary,
    FarEngine,
    FrameBuffer,
    FromEngine,
    NoticeHeard,
    PostWrite,
    StartEngine,
    WriteSettled,
    decode_to_engine,
    encode_frame,
)
from deltaserve.transports.mooncake.listeners import close_listeners
from deltaserve.transports.mooncake.notices import NoticeReader, NoticeSender, new_token
from deltaserve.transports.mooncake.options import PACKAGES, version_problem
from deltaserve.transports.registry import installed_version

try:
    from mooncake.engine import TransferEngine

    MISSING: str | None = None
except Exception as missing:  # whatever a library raises; told to the parent, which has a user to tell
    MISSING = f"{type(missing).__name__}: {missing}"

MAX_DESCRIPTORS = 1000
"""Most descriptors in one call of the library: it fails batches of 4000."""
_RECEIVE_BYTES = 1 << 20
_MAX_FRAME_BYTES = 64 << 20
_P2P = "P2PHANDSHAKE"
"""No metadata server: engines ask each other."""


class EngineHost:
    """The process: an engine, the regions it has mapped, and a thread for each rank of the peer."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        """Frames to the parent, which may not read for a while: nobody but one thread waits for that."""
        self._received = FrameBuffer(_MAX_FRAME_BYTES)
        self._selector = selectors.DefaultSelector()
        self._engine: Any = None
        self._token = new_token()
        self._notices: NoticeReader | None = None
        self._mappings: list[mmap] = []
        self._queues: list[SimpleQueue[PostWrite]] = []

    def run(self) -> NoReturn:
        """Serve until the parent has closed its end."""
        threading.Thread(target=self._send, daemon=True).start()
        self._selector.register(self._control, selectors.EVENT_READ, self._obey)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _obey(self) -> None:
        try:
            data = self._control.recv(_RECEIVE_BYTES)
        except ConnectionResetError:  # it went without reading all it was told
            data = b""
        if not data:
            os._exit(0)  # the library's threads are not waited for: what they do ends here
        for frame in self._received.feed(data):
            match decode_to_engine(frame):
                case StartEngine() as start:
                    self._start(start)
                case AttachEngines(ranks):
                    self._attach(ranks)
                case PostWrite() as post:
                    self._queues[post.rank].put(post)

    def _say(self, frame: FromEngine) -> None:
        self._outgoing.put(encode_frame(frame))

    def _send(self) -> None:
        with suppress(OSError):  # the parent is gone: the main thread learns it as well
            while True:
                self._control.sendall(self._outgoing.get())

    def _start(self, start: StartEngine) -> None:
        problem = MISSING or version_problem(library_version())
        if problem is not None:
            self._say(EngineWithoutLibrary(problem))
            return
        try:
            self._say(EngineReady(self._open(start)))
        except (OSError, RuntimeError) as error:
            self._say(EngineFailed(str(error)))

    def _open(self, start: StartEngine) -> EngineCard:
        """Listen first, restrict the listeners to one address, and only then register what may be written to."""
        self._engine = start_library(start)
        close_listeners(start.host)
        self._notices = NoticeReader(start.host, self._token, lambda rank, data: self._say(NoticeHeard(rank, data)))
        self._notices.join(self._selector)
        bases = {region.id: self._register(region.file, region.num_bytes) for region in start.regions}
        port = int(self._engine.get_rpc_port())
        return EngineCard(start.host, port, self._notices.port, self._token, library_version(), bases)

    def _register(self, file: int, num_bytes: int) -> int:
        """Map and register a region; its address here."""
        mapping = mmap(file, num_bytes, flags=MAP_SHARED)
        os.close(file)
        self._mappings.append(mapping)
        base = addressof(c_char.from_buffer(mapping))
        if self._engine.register_memory(base, num_bytes) != 0:
            raise RuntimeError(f"the library does not register {num_bytes} bytes")
        return base

    def _attach(self, ranks: tuple[FarEngine, ...]) -> None:
        assert self._notices is not None
        for far in ranks:
            queue: SimpleQueue[PostWrite] = SimpleQueue()
            self._queues.append(queue)
            threading.Thread(target=self._serve, args=(far, queue), daemon=True).start()
        self._notices.attach(ranks)

    def _serve(self, far: FarEngine, queue: "SimpleQueue[PostWrite]") -> NoReturn:
        """Write to one rank, one write after the other: the library's calls wait until all is there."""
        session, sender = f"{far.host}:{far.port}", NoticeSender(self._token, far)
        while True:
            post = queue.get()
            is_done = self._write(session, post)
            if is_done and post.notification is not None:
                try:
                    sender.tell(post.notification)
                except OSError:
                    is_done = False
            self._say(WriteSettled(post.write, is_done))

    def _write(self, session: str, post: PostWrite) -> bool:
        """Whether the library reports all of it as written. A failure is that of this write: the next begins anew."""
        sources, targets, lengths = (_unpacked(data) for data in (post.sources, post.targets, post.lengths))
        for first in range(0, len(sources), MAX_DESCRIPTORS):
            part = slice(first, first + MAX_DESCRIPTORS)
            if self._engine.batch_transfer_sync_write(session, sources[part], targets[part], lengths[part]) != 0:
                return False
        return True


def start_library(start: StartEngine) -> Any:
    """Raises RuntimeError with what the library said last. What it says of a start that goes well is of no use."""
    engine = TransferEngine()
    with os.fdopen(os.memfd_create("stderr"), "w+b", buffering=0) as said:
        shown = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            status = engine.initialize(start.host, _P2P, start.protocol, start.devices)
        finally:
            os.dup2(shown, 2)
            os.close(shown)
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if status != 0:
        where = f"over {start.protocol} on {start.devices or start.host}"
        raise RuntimeError(f"the library does not start {where}: {lines[-1] if lines else 'it does not say why'}")
    return engine


def library_version() -> str:
    """Empty when it was not installed as a package."""
    found = installed_version(PACKAGES)
    return "" if found is None else found[1]


def _unpacked(data: bytes) -> list[int]:
    numbers = array("Q")
    numbers.frombytes(data)
    return numbers.tolist()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to answer
    EngineHost(socket.socket(fileno=int(sys.argv[1]))).run()
