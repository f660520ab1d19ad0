"""The production endpoint over the loopback transport, with every write labelled by the ticket it was posted under."""

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from deltaserve.control.transfer.commands import PostChunk, TicketId, TransferCommand, TransferReport
from deltaserve.control.transfer.endpoint import Endpoint
from deltaserve.control.transfer.endpoint_config import EndpointConfig, Memory
from deltaserve.control.transfer.gate import ChunkJob, Gate
from deltaserve.control.transfer.ring import RingLease
from deltaserve.control.transfer.staging import StagedWindow, Staging
from deltaserve.core.errors import IntegrityError
from deltaserve.core.extents import Copy
from deltaserve.core.ids import PeerName, PoolId, RegionId
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.transport import Evidence, FenceResult, RemoteRank, TransportError, WriteId
from deltaserve.core.wire.staged_frames import StagedData, decode_stage, encode_stage, is_stage_frame
from deltaserve.sim.faults import FaultKind, never
from deltaserve.sim.loopback import Fabric, LoopbackTransport
from deltaserve.sim.situations import Sightings, Situation
from deltaserve.sim.staged_stamps import StampStaging


def _misplaced(notification: bytes) -> bytes:
    """The plan of a staged write, for the pages beside those that it is for."""
    data = decode_stage(notification)
    if not isinstance(data, StagedData):
        return notification
    parts = [replace(part, pages=pack_u32(abs(page - 1) for page in unpack_u32(part.pages))) for part in data.parts]
    return encode_stage(replace(data, parts=tuple(parts)))


class SimTransport(LoopbackTransport):
    """Knows under which ticket each write was posted: what no one-sided transport can tell a reader."""

    def __init__(
        self,
        me: PeerName,
        fabric: Fabric,
        memory: dict[RegionId, bytearray],
        fence_result: FenceResult = FenceResult.CLOSED,
        evidence: Evidence = Evidence.COMPLETION,
    ) -> None:
        super().__init__(me, fabric, memory, fence_result, evidence)
        self.posting: TicketId | None = None
        self.refuses: Callable[[FaultKind], bool] = never
        self.tickets: dict[WriteId, TicketId] = {}

    def open(self, peer: PeerName) -> bytes:
        if self.refuses(FaultKind.OPEN_FAILS):
            raise TransportError(f"open {peer}: refused")
        return super().open(peer)

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        if self.refuses(FaultKind.ATTACH_FAILS):
            raise TransportError(f"attach to {peer}: refused")
        super().attach(peer, ranks)

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        if copies and notification is not None and is_stage_frame(notification) and self.refuses(FaultKind.WRONG_PLAN):
            notification = _misplaced(notification)
        write = super().write(peer, copies, notification, rank)
        if self.posting is not None:
            self.tickets[write] = self.posting
        return write


class TaggedEndpoint(Endpoint):
    """Says under which ticket it posts, and checks that a ticket's chunks are handed over once each, in order (I20)."""

    def __init__(
        self, config: EndpointConfig, transport: SimTransport, memory: Memory, staging: Staging | None = None
    ) -> None:
        super().__init__(config, transport, memory, staging)
        self._labels = transport
        self._chunks: Counter[TicketId] = Counter()
        """Chunks of each ticket handed over so far."""
        self._ends: dict[tuple[TicketId, PoolId], int] = {}
        """Where the last chunk with pages of that pool ended."""
        self._staged_memory = staging.memory if staging is not None else None
        self._lent: frozenset[RingLease | None] = frozenset()
        self.met = Sightings()

    @property
    def is_moving(self) -> bool:
        """Whether the next turn gathers or scatters something."""
        return self.staged is not None and self.staged.is_moving

    @property
    def is_draining(self) -> bool:
        """Whether a reader waits for the end of what is under way."""
        return any(link.closing for link in self._links.values())

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        if isinstance(command, PostChunk):
            if command.chunk != self._chunks[command.ticket]:
                raise IntegrityError(f"I20: chunk {command.chunk} after {self._chunks[command.ticket]} chunks")
            self._chunks[command.ticket] += 1
            for pairs in command.pairs:
                end = self._ends.setdefault((command.ticket, pairs.pool), pairs.first)
                if pairs.first != end:
                    raise IntegrityError(f"I20: a chunk starts at page {pairs.first}, the last ended at {end}")
                self._ends[command.ticket, pairs.pool] = end + len(pairs.dst)
        return super().perform(command, now)

    def poll(self, now: float) -> list[TransferReport]:
        reports = super().poll(now)
        self._wipe_what_was_lent()
        self.met.note(Situation.LOOKED_AGAIN, bool(self._landings))
        if self.staged is not None:
            num_waiting = self.staged.reader.ring.num_waiting + self.staged.writer.ring.num_waiting
            self.met.note(Situation.STAGING_WAIT, num_waiting > 0)
            self.met.note(Situation.STAGED_DIRECTLY, self.counters["staging_fallbacks"] > 0)
        return reports

    def _jobs(self, link: object, command: PostChunk) -> list[ChunkJob]:
        jobs = super()._jobs(link, command)  # type: ignore[arg-type]
        for job in jobs:
            self._look_at_windows([window for window in job.windows if isinstance(window, StagedWindow)])
        return jobs

    def _look_at_windows(self, staged: Sequence[StagedWindow]) -> None:
        """A window is of one pool."""
        most = max(Counter(window.parts[0].group for window in staged).values(), default=0)
        self.met.note(Situation.STAGED, most > 0)
        self.met.note(Situation.STAGED_UNPROVEN, most > 0 and self._transport.evidence is Evidence.CONTENTS)
        self.met.note(Situation.SEVERAL_WINDOWS, most > 1)
        self.met.note(Situation.MIDDLE_WINDOWS, most > 2)

    def _wipe_what_was_lent(self) -> None:
        """Else an earlier write of the same pages would look like the one that is on its way."""
        if self.staged is not None and isinstance(memory := self._staged_memory, StampStaging):
            ring = self.staged.reader.ring
            leases = frozenset(map(ring.lease_of, ring))
            for lease in leases - self._lent:
                if lease is not None:
                    memory.wipe(lease.offset, lease.num_bytes)
            self._lent = leases

    def _post_next(self, link: object, gate: Gate, job: ChunkJob, now: float, reports: list[TransferReport]) -> None:
        self._labels.posting = gate.ticket
        super()._post_next(link, gate, job, now, reports)  # type: ignore[arg-type]
        self._labels.posting = None  # what is staged is written later: see sim/watch.py
