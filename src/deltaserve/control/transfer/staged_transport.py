"""A Transport over another one that can also write by way of staging memory: it drives a rank's writer and reader."""

from collections import Counter
from collections.abc import Mapping, Sequence

from deltaserve.control.transfer.staged_reader import StagedReader
from deltaserve.control.transfer.staged_writer import StagedWriter
from deltaserve.control.transfer.staging import Staging, StagingRank
from deltaserve.core.errors import ProtocolError
from deltaserve.core.extents import Copy
from deltaserve.core.ids import PeerName, PoolId
from deltaserve.core.transport import Evidence, FenceResult, Notification, RemoteRank, Transport, WriteId, WriteState
from deltaserve.core.wire.staged_frames import FrameOfReader, decode_stage, is_stage_frame

_SLICES_PER_TURN = 4
"""Slices of gathers and scatters moved between two turns of whoever polls."""


class StagedTransport:
    """A staged write is begun by `writer` and polled here, as any other. For one thread."""

    def __init__(
        self, transport: Transport, staging: Staging, rank: int, pools: Mapping[str, PoolId], counters: Counter[str]
    ) -> None:
        """`rank`: of this side. `pools`: of each page group. `counters`: COUNTERS."""
        self._transport = transport
        self._here = StagingRank(transport, staging, counters)
        self.writer = StagedWriter(self._here)
        self.reader = StagedReader(self._here, rank, pools)
        self._plain: dict[WriteId, tuple[PeerName, WriteId]] = {}
        """Writes that only pass through |-> their numbers below."""

    @property
    def evidence(self) -> Evidence:
        return self._transport.evidence

    def open(self, peer: PeerName) -> bytes:
        metadata = self._transport.open(peer)
        self.reader.open(peer)
        return metadata

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        self._transport.attach(peer, ranks)

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        posted = self._transport.write(peer, copies, notification, rank)
        write = WriteId(next(self._here.ids))
        self._plain[write] = peer, posted
        return write

    def poll(self, write: WriteId) -> WriteState:
        if write not in self._plain:
            return self.writer.poll(write)
        state = self._transport.poll(self._plain[write][1])
        if state is not WriteState.PENDING:
            del self._plain[write]
        return state

    def fence(self, peer: PeerName) -> FenceResult:
        result = self._transport.fence(peer)
        self._plain = {write: plain for write, plain in self._plain.items() if plain[0] != peer}
        self.writer.fence(peer, result)
        self.reader.fence(peer, result)
        return result

    def advance(self, now: float) -> None:
        """Time goes on; what waits is looked at with the next `notifications`."""
        self._here.look_at_clock(now)

    def notifications(self) -> list[Notification]:
        """Drives gathers, scatters and waits, and the transport below between their slices."""
        heard: list[Notification] = []
        is_busy = True
        for _ in range(_SLICES_PER_TURN):
            for notification in self._transport.notifications():
                if is_stage_frame(notification.data):
                    self._hear(notification)
                else:
                    heard.append(notification)
            self.reader.wait()
            self.writer.wait()
            is_busy = self.reader.move_a_slice(heard)
            if not (self.writer.move_a_slice() or is_busy):
                break
        self._here.forget_frames()
        return heard

    def _hear(self, notification: Notification) -> None:
        peer, data, rank = notification
        if not self.reader.knows(peer):
            return
        try:
            frame = decode_stage(data)
        except ProtocolError:
            self._here.counters["staging_malformed"] += 1
            return
        if isinstance(frame, FrameOfReader):
            self.writer.hear(peer, rank, frame)
        else:
            self.reader.hear(peer, rank, frame)

    @property
    def is_moving(self) -> bool:
        """The next turn gathers or scatters something."""
        return self.reader.is_moving or self.writer.is_moving

    @property
    def is_quiet(self) -> bool:
        """Nothing is leased, waits or moves."""
        return self.reader.is_quiet and self.writer.is_quiet

    def check_integrity(self) -> None:
        self.reader.ring.check_integrity()
        self.writer.ring.check_integrity()
