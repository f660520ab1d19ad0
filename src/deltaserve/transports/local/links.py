"""The two ends of a connection of the local transport: who writes asks, who reads copies and acknowledges.

Neither waits for the other. A connection that ends, or says what it must not, is closed, and nothing more comes of it.
"""

import logging
import socket
from collections import deque
from collections.abc import Sequence

import numpy as np

from deltaserve.core.transport import TransportError, WriteState
from deltaserve.transports.local.frames import (
    PACKET_BYTES,
    LocalHello,
    WriteAssembly,
    WriteFrame,
    decode_ack,
    encode_ack,
    encode_hello,
)
from deltaserve.transports.local.memory import FarMemory, LocalRegions
from deltaserve.transports.local.memory_access import Addresses, MemoryAccess

log = logging.getLogger(__name__)

_FRAME_COST = 64 << 10
"""What a write without bytes counts for, in bytes: so a turn ends also where only notifications come."""
_MAX_UNHEARD_ACKS = 1024
"""A writer that does not read what is acknowledged gets no further."""


class _Packets:
    """A socket of which nobody waits: what cannot be sent yet is kept, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._unsent: deque[bytes] = deque()
        self.is_open = True

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def send(self, packet: bytes) -> None:
        self._unsent.append(packet)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent and self.is_open:
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.close()

    def receive(self) -> bytes | None:
        """The next packet; None when there is none, or never will be."""
        if not self.is_open:
            return None
        try:
            packet, _, flags, _ = self._socket.recvmsg(PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet, flags = b"", 0
        if not packet or flags & socket.MSG_TRUNC:
            self.close()
            return None
        return packet

    def close(self) -> None:
        self.is_open = False
        self._unsent.clear()
        self._socket.close()


class WriterLink:
    """The writer's end of a connection to one rank of a peer: writes go out, acknowledgements come in."""

    def __init__(self, connection: socket.socket, hello: LocalHello, files: Sequence[int]) -> None:
        """Send the hello with the regions' files. Raises OSError."""
        connection.setblocking(False)
        socket.send_fds(connection, [encode_hello(hello)], list(files), socket.MSG_NOSIGNAL)
        self._packets = _Packets(connection)
        self._pending: set[int] = set()
        self._done: set[int] = set()

    @property
    def is_open(self) -> bool:
        return self._packets.is_open

    def start(self, id: int, frame: bytes) -> None:
        self._pending.add(id)
        for at in range(0, len(frame), PACKET_BYTES):
            self._packets.send(frame[at : at + PACKET_BYTES])

    def advance(self) -> None:
        """Send what waits, and hear what was acknowledged."""
        self._packets.flush()
        while (packet := self._packets.receive()) is not None:
            id = decode_ack(packet)
            if id is None or id not in self._pending:
                log.warning("a reader acknowledges what was not written: its connection is closed")
                self._packets.close()
                return
            self._pending.discard(id)
            self._done.add(id)

    def take_state(self, id: int) -> WriteState:
        """DONE and ERROR are final and forget the write."""
        if id in self._done:
            self._done.discard(id)
            return WriteState.DONE
        if id in self._pending and self.is_open:
            return WriteState.PENDING
        self._pending.discard(id)
        return WriteState.ERROR

    def close(self) -> None:
        self._packets.close()


class _CopyJob:
    """A write that is being copied."""

    def __init__(self, frame: WriteFrame, sources: Addresses, targets: Addresses) -> None:
        """Addresses of this process."""
        self.id = frame.id
        self.notification = frame.notification
        self._targets, self._sources, self._lengths = targets, sources, frame.spans[-1]
        self._ends = np.cumsum(self._lengths)  # [copies] bytes up to the end of each
        self._total = int(self._ends[-1]) if len(self._ends) else 0
        self._num_copied = 0

    @property
    def is_over(self) -> bool:
        return self._num_copied == self._total

    def advance(self, access: MemoryAccess, limit: int) -> int:
        """Copy up to `limit` bytes; how many. Raises TransportError."""
        begin, end = self._num_copied, min(self._num_copied + limit, self._total)
        if begin == end:
            return 0
        first = int(np.searchsorted(self._ends, begin, "right"))
        last = int(np.searchsorted(self._ends, end, "left"))
        these = slice(first, last + 1)
        targets, sources, lengths = (each[these].copy() for each in (self._targets, self._sources, self._lengths))
        done = np.uint64(begin - int(self._ends[first] - self._lengths[first]))  # of the first of these
        targets[0], sources[0], lengths[0] = targets[0] + done, sources[0] + done, lengths[0] - done
        lengths[-1] -= np.uint64(int(self._ends[last]) - end)
        access.copy(targets, sources, lengths)
        self._num_copied = end
        return end - begin


class ReaderLink:
    """The reader's end of a connection from one rank of a peer: copies what it writes, and acknowledges it."""

    def __init__(self, connection: socket.socket, writer: int, memory: FarMemory, regions: LocalRegions) -> None:
        """`writer`: token of the endpoint at the other end."""
        self.writer = writer
        self.heard: list[bytes] = []
        """Notifications, each after its data; for the owner to take."""
        self._packets = _Packets(connection)
        self._memory = memory
        self._regions = regions
        self._assembly = WriteAssembly()
        self._job: _CopyJob | None = None

    @property
    def is_open(self) -> bool:
        return self._packets.is_open

    def advance(self, limit: int) -> int:
        """Work on the oldest write, copying at most `limit` bytes; what that cost in bytes, 0: there was nothing."""
        self._packets.flush()
        try:
            if self._job is None and self._packets.num_unsent < _MAX_UNHEARD_ACKS:
                self._job = self._next_job()
            if self._job is None:
                return 0
            return max(self._work(self._job, limit), _FRAME_COST)
        except TransportError as error:
            log.warning("a local connection is closed: %s", error)
            self.close()
            return 0

    def close(self) -> None:
        """Stop copying, at once and for good. Idempotent."""
        self._packets.close()
        self._job = None
        self._memory.close()

    def _work(self, job: _CopyJob, limit: int) -> int:
        num_bytes = job.advance(self._regions.access, limit)
        if not self._memory.stands():
            self.close()  # the writer has fenced us: what was copied may be anything, and no more comes
        elif job.is_over:
            self._job = None
            self._packets.send(encode_ack(job.id))
            if job.notification is not None:
                self.heard.append(job.notification)
        return num_bytes

    def _next_job(self) -> _CopyJob | None:
        while (packet := self._packets.receive()) is not None:
            frame = self._assembly.feed(packet)
            if frame is None:
                continue
            src_ids, src_offsets, dst_ids, dst_offsets, lengths = frame.spans
            sources = self._memory.table.locate(src_ids, src_offsets, lengths)
            targets = self._regions.table.locate(dst_ids, dst_offsets, lengths)
            if sources is None or targets is None:
                raise TransportError("a write outside the regions of its sides")
            return _CopyJob(frame, sources, targets)
        if not self._packets.is_open:
            self.close()
        return None
