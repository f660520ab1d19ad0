"""One worker of several ranks, as its control plane sees it: a command goes to every rank, their reports become one.

    command           every rank performs it; a VerifyPages is split by whose pages they are
    report            when the last rank has told
    EndpointOpened    the ends of all, in order
    EndpointFailed    any of them; told when all have answered. What the others have opened stays until the next
                      OpenEndpoint or FencePeer of that peer ends it: no ticket was given for it
    ChunkSent         the bytes of all
    WriteFailed       the first of a ticket, at once
    GateDraining      the bytes outstanding on all
    GateDrained       DIRTY if one is
    PagesVerified     the first problem
    PeerFenced        IMPOSSIBLE if one is
    Landed            as it comes: the coverage of the ticket counts the pairs of ranks (coverage.py)
    StagingUsed       as it comes

Ranks are not in step: one may be seconds behind. A report that nobody waits for any more is dropped: after a FencePeer
or an OpenEndpoint nothing that was under way with that peer is answered for, as with one rank. All that is kept hangs
on a ticket, or on a command that every rank answers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deltaserve.control.transfer.commands import (
    AttachEndpoint,
    ChunkSent,
    CloseGate,
    EndpointAttached,
    EndpointFailed,
    EndpointOpened,
    ExpectPages,
    FencePeer,
    ForgetPages,
    GateDrained,
    GateDraining,
    Landed,
    LoadPages,
    OpenEndpoint,
    OpenGate,
    PagesCopied,
    PagesVerified,
    PeerFenced,
    PostChunk,
    StagingUsed,
    StorePages,
    TicketId,
    TransferCommand,
    TransferReport,
    VerifyPages,
    WriteFailed,
)
from deltaserve.core.ids import PeerName
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Drain, RankEnd


@dataclass(slots=True)
class _Opening:
    """An endpoint being opened on every rank, perhaps attached."""

    number: int
    waiting: set[int]
    """Ranks that have not done, or failed at, what they were told last."""
    attaches: bool
    """Whether that is to attach; or only to open."""
    opened: dict[int, RankEnd] = field(default_factory=dict)
    problem: str | None = None
    """What the first rank that failed told; None: none failed."""


@dataclass(slots=True)
class _Chunk:
    """A chunk on its way."""

    waiting: set[int]
    num_bytes: int = 0


@dataclass(slots=True)
class _Ticket:
    """A ticket that the ranks write by."""

    peer: PeerName
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    has_failed: bool = False
    undrained: set[int] | None = None
    """Ranks that wait for writes. None: its gate is open."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """Bytes of these, by rank."""
    outcome: Drain = Drain.CLEAN


@dataclass(slots=True)
class _Check:
    """Pages being verified on every rank."""

    peer: PeerName
    waiting: set[int]
    problem: str | None = None


@dataclass(slots=True)
class _Fence:
    """Endpoints being ended on every rank."""

    waiting: set[int]
    result: FenceResult = FenceResult.CLOSED


@dataclass(slots=True)
class _Copies:
    """Pages copied to, or from, the file of every rank."""

    waiting: set[int]
    told: PagesCopied | None = None
    """What those that have answered amount to."""


class RankGroup:
    """What all ranks of a worker were told, and which of them have answered."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._openings: dict[PeerName, _Opening] = {}
        self._tickets: dict[TicketId, _Ticket] = {}
        self._checks: dict[TicketId, _Check] = {}
        self._fences: dict[PeerName, deque[_Fence]] = {}
        self._copies: dict[int, _Copies] = {}

    @property
    def num_pending(self) -> int:
        """Tickets and commands that some rank still answers for."""
        num_opening = sum(1 for opening in self._openings.values() if opening.waiting)
        num_fenced = sum(map(len, self._fences.values()))
        return num_opening + len(self._tickets) + len(self._checks) + num_fenced + len(self._copies)

    # ------------------------------------------------------------ commands

    def fan_out(self, command: TransferCommand) -> Sequence[TransferCommand | None]:
        """What each rank is told, in order of the ranks. None: nothing."""
        match command:
            case OpenEndpoint():
                self._forget(command.peer)
                self._openings[command.peer] = _Opening(command.greeting, set(self._ranks), command.theirs is not None)
            case AttachEndpoint():
                opening = self._opening_of(command.peer, command.greeting)
                if opening is not None:
                    opening.waiting, opening.attaches = set(self._ranks), True
            case OpenGate():
                self._tickets[command.ticket] = _Ticket(command.peer)
            case PostChunk():
                ticket = self._tickets.get(command.ticket)
                if ticket is not None:
                    ticket.chunks[command.chunk] = _Chunk(set(self._ranks))
            case CloseGate():
                ticket = self._tickets.get(command.ticket)
                if ticket is not None:
                    ticket.undrained = set(self._ranks)
            case VerifyPages():
                return self._split(command)
            case ExpectPages() | ForgetPages():
                pass
            case StorePages() | LoadPages():
                self._copies[command.number] = _Copies(set(self._ranks))
            case FencePeer():
                self._forget(command.peer)
                self._fences.setdefault(command.peer, deque()).append(_Fence(set(self._ranks)))
        return [command for _ in self._ranks]

    def _split(self, command: VerifyPages) -> list[TransferCommand | None]:
        checks = [tuple(check for check in command.checks if check.pair.reader == rank) for rank in self._ranks]
        self._checks[command.ticket] = _Check(command.peer, {rank for rank in self._ranks if checks[rank]})
        return [replace(command, checks=of_rank) if of_rank else None for of_rank in checks]

    def _forget(self, peer: PeerName) -> None:
        """Nothing that is under way with the peer is answered for."""
        self._openings.pop(peer, None)
        for key in [key for key, ticket in self._tickets.items() if ticket.peer == peer]:
            del self._tickets[key]
        for key in [key for key, check in self._checks.items() if check.peer == peer]:
            del self._checks[key]  # where contents are looked at for a while, a fence ends that without an answer

    # ------------------------------------------------------------ reports

    def reduce(self, rank: int, report: TransferReport) -> list[TransferReport]:
        """What the report of one rank amounts to for the worker."""
        match report:
            case Landed() | StagingUsed():
                return [report]
            case EndpointOpened():
                return self._opened(rank, report)
            case EndpointAttached() | EndpointFailed():
                return self._attached(rank, report)
            case ChunkSent():
                return self._sent(rank, report)
            case WriteFailed():
                return self._failed(report)
            case GateDraining() | GateDrained():
                return self._drained(rank, report)
            case PagesVerified():
                return self._verified(rank, report)
            case PeerFenced():
                return self._fenced(rank, report)
            case PagesCopied():
                return self._copied(rank, report)

    def _opening_of(self, peer: PeerName, number: int) -> _Opening | None:
        opening = self._openings.get(peer)
        return opening if opening is not None and opening.number == number else None

    def _opened(self, rank: int, report: EndpointOpened) -> list[TransferReport]:
        opening = self._opening_of(report.peer, report.greeting)
        if opening is None:
            return []
        (opening.opened[rank],) = report.ends
        if not opening.attaches:
            opening.waiting.discard(rank)
        if len(opening.opened) < len(self._ranks):
            return self._failed_opening(report.peer, opening)
        ends = tuple(opening.opened[rank] for rank in self._ranks)
        return [EndpointOpened(report.peer, report.greeting, ends)]

    def _attached(self, rank: int, report: EndpointAttached | EndpointFailed) -> list[TransferReport]:
        opening = self._opening_of(report.peer, report.greeting)
        if opening is None:
            return []
        opening.waiting.discard(rank)
        if isinstance(report, EndpointFailed) and opening.problem is None:
            opening.problem = f"rank {rank}: {report.message}"
        if opening.waiting or opening.problem is not None:
            return self._failed_opening(report.peer, opening)
        del self._openings[report.peer]
        return [report]

    def _failed_opening(self, peer: PeerName, opening: _Opening) -> list[TransferReport]:
        """Told when the last rank has answered."""
        if opening.waiting or opening.problem is None:
            return []
        del self._openings[peer]
        return [EndpointFailed(peer, opening.number, opening.problem)]

    def _sent(self, rank: int, report: ChunkSent) -> list[TransferReport]:
        ticket = self._tickets.get(report.ticket)
        chunk = ticket.chunks.get(report.chunk) if ticket is not None else None
        if ticket is None or chunk is None:
            return []
        chunk.waiting.discard(rank)
        chunk.num_bytes += report.num_bytes
        if chunk.waiting:
            return []
        del ticket.chunks[report.chunk]
        if report.is_last and ticket.undrained is None:
            del self._tickets[report.ticket]
        return [replace(report, num_bytes=chunk.num_bytes)]

    def _failed(self, report: WriteFailed) -> list[TransferReport]:
        ticket = self._tickets.get(report.ticket)
        if ticket is None or ticket.has_failed:
            return []
        ticket.has_failed = True
        return [report]

    def _drained(self, rank: int, report: GateDraining | GateDrained) -> list[TransferReport]:
        ticket = self._tickets.get(report.ticket)
        if ticket is None or ticket.undrained is None:
            return []
        if isinstance(report, GateDraining):
            ticket.outstanding[rank] = report.bytes_outstanding
            return [GateDraining(report.ticket, sum(ticket.outstanding.values()))]
        ticket.undrained.discard(rank)
        ticket.outstanding.pop(rank, None)
        if report.outcome is Drain.DIRTY:
            ticket.outcome = Drain.DIRTY
        if ticket.undrained:
            return []
        del self._tickets[report.ticket]
        return [GateDrained(report.ticket, ticket.outcome)]

    def _verified(self, rank: int, report: PagesVerified) -> list[TransferReport]:
        check = self._checks.get(report.ticket)
        if check is None:
            return []
        check.waiting.discard(rank)
        check.problem = check.problem or report.problem
        if check.waiting:
            return []
        del self._checks[report.ticket]
        return [PagesVerified(report.ticket, check.problem)]

    def _fenced(self, rank: int, report: PeerFenced) -> list[TransferReport]:
        fences = self._fences.get(report.peer, deque())
        fence = next((fence for fence in fences if rank in fence.waiting), None)
        if fence is None:
            return []
        fence.waiting.discard(rank)
        if report.result is FenceResult.IMPOSSIBLE:
            fence.result = FenceResult.IMPOSSIBLE
        if fence.waiting:
            return []
        fences.remove(fence)
        if not fences:
            del self._fences[report.peer]
        return [PeerFenced(report.peer, fence.result)]

    def _copied(self, rank: int, report: PagesCopied) -> list[TransferReport]:
        copies = self._copies.get(report.number)
        if copies is None:
            return []
        copies.waiting.discard(rank)
        copies.told = told = report if copies.told is None else _both(copies.told, report)
        if copies.waiting:
            return []
        del self._copies[report.number]
        return [told]


def _both(first: PagesCopied, then: PagesCopied) -> PagesCopied:
    """What the answers of two ranks to one command amount to."""
    return PagesCopied(
        first.number,
        min(first.num_good, then.num_good),
        first.num_bytes + then.num_bytes,
        max(first.seconds, then.seconds),
        first.problem or then.problem,
    )
