"""The production endpoint over the loopback transport, with every write labelled by the ticket it was posted under."""

from collections.abc import Sequence

from deltaserve.base.errors import IntegrityError
from deltaserve.base.extents import Copy
from deltaserve.base.ids import PeerName, RegionId
from deltaserve.sim.memory import StampMemory
from deltaserve.transfer.commands import PostChunk, TicketId, TransferCommand, TransferReport
from deltaserve.transfer.endpoint import Endpoint, EndpointConfig
from deltaserve.transfer.gate import ChunkJob
from deltaserve.transport.base import Evidence, FenceResult, WriteId
from deltaserve.transport.loopback import Fabric, LoopbackTransport


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
        self.tickets: dict[WriteId, TicketId] = {}

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None) -> WriteId:
        write = super().write(peer, copies, notification)
        if self.posting is not None:
            self.tickets[write] = self.posting
        return write


class TaggedEndpoint(Endpoint):
    """Says under which ticket it posts, and checks that a ticket's chunks are handed over once each, in order (I20)."""

    def __init__(self, config: EndpointConfig, transport: SimTransport, memory: StampMemory) -> None:
        super().__init__(config, transport, memory)
        self._labels = transport
        self._cursors: dict[TicketId, tuple[int, int]] = {}
        """Ticket |-> chunks and pages handed over so far."""

    def perform(self, command: TransferCommand, now: float) -> list[TransferReport]:
        if isinstance(command, PostChunk):
            chunks, pages = self._cursors.get(command.ticket, (0, 0))
            if (command.chunk, command.first_page) != (chunks, pages):
                raise IntegrityError(
                    f"I20: chunk {command.chunk} at page {command.first_page} follows {chunks}, {pages}"
                )
            self._cursors[command.ticket] = chunks + 1, pages + command.num_pages
        return super().perform(command, now)

    def _post_next(self, link: object, job: ChunkJob, now: float, reports: list[TransferReport]) -> None:
        self._labels.posting = job.command.ticket
        super()._post_next(link, job, now, reports)  # type: ignore[arg-type]
