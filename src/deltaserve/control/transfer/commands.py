"""What the control plane asks of the transfer thread, and what that thread reports. Frozen values, no answers lost.

Every command but PostChunk, OpenGate, ExpectPages and ForgetPages is answered by exactly one report, in order per peer.
With several ranks each of them performs every command and reports; ranks.py makes one answer of theirs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.core.ids import Boot, PageId, PeerName, PoolId, TicketSeq
from deltaserve.core.layout.copy_plan import RankPair
from deltaserve.core.layout.spec import PageTerms
from deltaserve.core.transport import FenceResult
from deltaserve.core.wire.messages import Done, Drain, RankEnd


class TicketId(NamedTuple):
    """A reader's permission for one writer to fill given pages. Never reused."""

    reader_boot: Boot
    writer_boot: Boot
    seq: TicketSeq


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """Create this side's endpoint for `peer`, and attach it when the peer's metadata is already known.

    An endpoint that still exists for that name is fenced first.
    """

    peer: PeerName
    greeting: int
    """Which handshake it belongs to, told again by its reports: those of an earlier one must not count."""
    theirs: tuple[RankEnd, ...] | None = None
    """The ends of the peer's ranks, in order; None while they are not known."""
    terms: PageTerms | None = None
    """Page size and dtypes of the peer's pages; None: as ours are, or not known yet."""


@dataclass(frozen=True, slots=True)
class AttachEndpoint:
    """Give an open endpoint its other side."""

    peer: PeerName
    greeting: int
    theirs: tuple[RankEnd, ...]
    terms: PageTerms | None = None
    """Page size and dtypes of the peer's pages; None: as ours are."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Writer: from now on this ticket may be posted."""

    peer: PeerName
    ticket: TicketId
    num_pages: tuple[int, ...] = ()
    """Per pool, of the reader: what it covers."""


@dataclass(frozen=True, slots=True)
class PagePairs:
    """What the prompt's pages `dst` of the reader hold is copied from `src`, pages of this rank, for all groups of a
    pool. With equal page sizes they are pairs."""

    pool: PoolId
    first: int
    """Index in the prompt of the first page of `dst`."""
    src_first: int
    """First page among `src`, counted in this side's pages."""
    src: tuple[PageId, ...]
    dst: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class PostChunk:
    """Writer: send a chunk. Posted at most once; dropped when the gate is closed."""

    peer: PeerName
    ticket: TicketId
    chunk: int
    pairs: tuple[PagePairs, ...]
    """Pages of each pool that has some in this chunk."""
    payload: bytes | None
    """Not None exactly for the last chunk: announced with it, after all data of the ticket was seen DONE."""


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Writer: post nothing more of this ticket; report GateDrained when nothing is outstanding."""

    peer: PeerName
    ticket: TicketId


@dataclass(frozen=True, slots=True)
class PageCheck:
    """Pages that must hash to the packed crc32 values the writer announced."""

    pair: RankPair
    """Pair of ranks whose announcement it was: what is compared are the heads that go between these two."""
    pool: PoolId
    first: int
    """Index in the prompt of the first page."""
    pages: tuple[PageId, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True)
class VerifyPages:
    """Reader: all chunks of a ticket have been announced: compare its pages with the announced checksums."""

    peer: PeerName
    ticket: TicketId
    checks: tuple[PageCheck, ...]
    num_tokens: int
    """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class FencePeer:
    """Destroy this side's endpoint for `peer`: afterwards no byte of it can land here, or leave from here."""

    peer: PeerName


@dataclass(frozen=True, slots=True)
class ExpectPages:
    """Reader: a ticket was granted to a peer that may stage. Nothing but its pages is scattered for it."""

    peer: PeerName
    ticket: TicketId
    firsts: tuple[int, ...]
    """Per pool: index in the prompt of the first page it covers."""
    pages: tuple[tuple[PageId, ...], ...]
    """Per pool, in order of the prompt."""


@dataclass(frozen=True, slots=True)
class ForgetPages:
    """Reader: the ticket is over. Nothing is scattered for it any more."""

    peer: PeerName
    ticket: TicketId


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A page of a pool, and its slot in the file under the tree; slots of each pool are numbered from 0."""

    pool: PoolId
    page: PageId
    slot: int
    key: bytes
    """What the page is known by, and the slot is to hold: another page, or a part of one, is not believed."""


@dataclass(frozen=True, slots=True)
class StorePages:
    """Copy pages that stay as they are, whole, to slots of the file under the tree."""

    number: int
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True)
class LoadPages:
    """Copy slots of the file under the tree to pages that nobody else knows of."""

    number: int
    copies: tuple[SlotCopy, ...]


TransferCommand = (
    OpenEndpoint
    | AttachEndpoint
    | OpenGate
    | PostChunk
    | CloseGate
    | VerifyPages
    | ExpectPages
    | ForgetPages
    | FencePeer
    | StorePages
    | LoadPages
)

# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class EndpointOpened:
    peer: PeerName
    greeting: int
    ends: tuple[RankEnd, ...]
    """The ends of our ranks, in order; in one rank's own report its end alone."""


@dataclass(frozen=True, slots=True)
class EndpointAttached:
    peer: PeerName
    greeting: int


@dataclass(frozen=True, slots=True)
class EndpointFailed:
    """Open or attach failed; the endpoint is gone."""

    peer: PeerName
    greeting: int
    message: str


@dataclass(frozen=True, slots=True)
class ChunkSent:
    """Writer: every byte of the chunk was seen DONE: its source pages may be unpinned."""

    ticket: TicketId
    chunk: int
    num_bytes: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Writer: a post or its completion failed. The ticket is dirty: bytes may still land."""

    peer: PeerName
    ticket: TicketId
    message: str


@dataclass(frozen=True, slots=True)
class GateDraining:
    """Writer: a closed gate still waits for writes. Told at once, then twice a second until GateDrained."""

    ticket: TicketId
    bytes_outstanding: int


@dataclass(frozen=True, slots=True)
class GateDrained:
    """The writer's answer to CloseGate."""

    ticket: TicketId
    outcome: Drain


@dataclass(frozen=True, slots=True)
class Landed:
    """Reader: the notification bound to a chunk's data arrived."""

    peer: PeerName
    pair: RankPair
    """Which rank of the peer wrote, as the transport knows it, and to which of ours."""
    done: Done


@dataclass(frozen=True, slots=True)
class PagesVerified:
    """Reader: answer to VerifyPages. `problem`: what disagrees, in words; None when nothing does."""

    ticket: TicketId
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PeerFenced:
    peer: PeerName
    result: FenceResult


@dataclass(frozen=True, slots=True)
class StagingUsed:
    """What a rank has done with its staging memory since it told last."""

    counts: tuple[tuple[str, int], ...]
    """Counter of control/transfer/staging.py, and by how much it has grown."""


@dataclass(frozen=True, slots=True)
class PagesCopied:
    """Answer to StorePages or LoadPages. With a problem the file is not to be believed about any page stored."""

    number: int
    num_good: int
    """So many of the pages, from the first on, hold what was asked for; the slot behind them does not."""
    num_bytes: int
    seconds: float
    """What copying took."""
    problem: str | None = None
    """What is wrong with the first that is not good, in words."""


TransferReport = (
    EndpointOpened
    | EndpointAttached
    | EndpointFailed
    | ChunkSent
    | WriteFailed
    | GateDraining
    | GateDrained
    | Landed
    | PagesVerified
    | PeerFenced
    | StagingUsed
    | PagesCopied
)
