"""Every message a worker link may carry, and no others.

front -> decode  Submit, Cancel, Finish             decode -> front   Tokens, Finished, PromptLogprobs
front -> prefill Submit, Cancel                     prefill -> front  Finished
front -> any     Flush, ChangeRole, AskTree          any -> front     TreeShape
decode -> prefill Offer, Ask, AskLogprobs, Cancel,  prefill -> decode Queued, Starting, PromptLogprobs
                  WriteBack
reader -> writer  Grant, Revoke                     writer -> reader  Failed, Draining, Drained, Sent
writer -> reader, bound to the data it announces (transport notification): Done
decode reads prompts and writes answers back, prefill the other way round.
all: Hello, Heartbeat, Status, Events

Ids and page lists are packed little-endian uint32. Times are remaining milliseconds: clocks are not compared.
"""

from enum import Enum

import msgspec

from deltaserve.core.errors import FailReason
from deltaserve.core.hints import NO_HINTS, HintAnswer, KvHints
from deltaserve.core.ids import Role
from deltaserve.core.sampling import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 13


class CacheUse(Enum):
    """What a request may do with the trees. Warm-up, health probes and benchmarks say so explicitly."""

    NORMAL = "normal"
    BYPASS = "bypass"
    """Match nothing, insert nothing."""


class FinishReason(Enum):
    """Why a complete answer ended. Values as in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class Cores(Enum):
    """Whose the cores are that decode computes on."""

    OWN = "own"
    SHARED = "shared"
    """Prefill's as well: what one of them computes keeps the other from computing."""


class Drain(Enum):
    """What prefill knows when a revoked ticket's gate is closed and nothing is outstanding.

    CLEAN: every posted write was seen DONE. DIRTY: at least one was not; decode must fence before it frees.
    """

    CLEAN = "clean"
    DIRTY = "dirty"


class RegionInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A registered region, as a peer must know it to write there."""

    id: int
    base: int
    num_bytes: int
    device: str
    component: str
    """Name of the page group."""


class RankEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One rank's end of a link that carries pages."""

    metadata: bytes
    """Connection data of the rank's transport endpoint for this peer."""
    regions: tuple[RegionInfo, ...]
    """Where the peer may write, by its tickets."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Where an instance listens for worker links."""

    name: str
    url: str


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What the other side must know, and which may be another there; not part of compatibility."""

    page_size: int = 0
    kv_dtypes: dict[str, str] = {}
    """Page group |-> dtype of what its pages hold; absent: as on the other side."""
    has_staging: bool = False
    """Whether every rank of the sender can stage writes."""
    needs_equal_pages: bool = False
    """Some layers do not keep all tokens: pages move only to and from pages of the same size."""
    pool_pages: tuple[int, ...] = ()
    max_context_len: int = 0
    max_running: int = 0
    vocab_size: int = 0
    keys_seed_check: bytes = b""
    """Hash of (cluster secret, fingerprint): unequal secrets are found at the handshake, not as misses."""
    group: str = ""
    """Where the members of its expert group meet, equal among them: none of them computes without the others. Empty: it
    is in none, or whoever started it says so."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Opens (or re-opens) a link. Both sides send one. Everything in `compat` must be equal between P and D."""

    role: str
    version: int = PROTOCOL_VERSION
    compat: dict[str, str]
    facts: Facts
    transport: str = ""
    ends: tuple[RankEnd, ...] = ()
    """The ends of the sender's ranks, in order; none on links that carry no data."""
    answers: bytes = b""
    """Digest of the ends this answers: an answer to an earlier Hello fits no endpoint any more."""
    peers: tuple[PeerAddress, ...] = ()
    """Prefill workers this instance may be told to use; only the front sends any."""
    configured_role: str = ""
    """What the process was started as, once its role was changed, be it back. Empty: it never was."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Every 0.5 s; a peer not heard of for long is lost (peer.table.Patience). Any frame counts as one."""

    is_ready: bool = True
    """False: the sender has ended this link, or never knew it. Whoever thinks that it is up must send Hello again."""
    ends: bytes = b""
    """Digest of the transport endpoints that the sender has for the receiver; empty where it has none. Whoever has
    attached to others ends the link: the Hello that told of these was lost."""


class PrefillWay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done until prefill would hand a prompt over, in tokens that it computes meanwhile."""

    queue_len: int
    """Tokens of other prompts before it."""
    lacking_len: int
    """Tokens of it that prefill has no KV of."""
    handover_len: int
    """What the hand-over takes."""
    pulled_len: int = 0
    """What decode has of `lacking_len`, and may be asked for. 0: nothing."""
    pull_len: int = 0
    """What having that sent takes."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The front hands one sample to decode (or to a unified instance). Decode owns it from here.

    Prefill computes nothing for it: it says when the part that decode asks of it is over (engine/watched.py).

    Sent again when frames, a connection or a worker were lost: decode goes on behind the output that is part of
    `prompt`, from the room it has, from the answer it remembers, or from a room that it opens for it.
    """

    room: bytes
    epoch: int
    """Counts the Submits of this room from 1. What decode says of the room bears the highest one it took."""
    prompt: bytes
    """The client's prompt, and behind it the output that was delivered."""
    prompt_len: int
    """Tokens of the client's prompt: the next token drawn has output position len(prompt) - prompt_len."""
    keys: bytes
    """Packed keys of the leading full pages of `prompt`."""
    namespace: str
    sampling: SamplingParams
    prefill: PeerAddress | None
    """Worker to offer the prompt to; None: compute the prompt here."""
    remaining_ms: int
    cache: CacheUse = CacheUse.NORMAL
    prefill_way: PrefillWay | None = None
    """What speaks against prefill: decode computes the prompt itself where that takes less (engine/near.py). None: it
    does not ask."""
    decode_hit_len: int = 0
    """Tokens of the prompt that decode was taken to hold for that: what it holds less has to be computed."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that the prefill worker computes per second; None: not measured."""
    hints: KvHints = NO_HINTS
    priority: int = 0
    """As `core/priority.py` says."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Decode asks prefill to compute a prompt. Repeated until answered; prefill holds nothing before it."""

    room: bytes
    attempt: int
    prompt: bytes
    """Prompt of this attempt: after a retraction it includes the output so far."""
    prompt_len: int
    """Tokens of the original prompt: the first token drawn has output position len(prompt) - prompt_len."""
    namespace: str
    sampling: SamplingParams
    remaining_ms: int
    cache: CacheUse = CacheUse.NORMAL
    held_len: int = 0
    """Tokens that the prompt begins with and decode has, as far as whole pages of both sides go: prefill may grant
    pages for them. 0: it has none, or none that prefill may use."""
    hints: KvHints = NO_HINTS
    priority: int = 0


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Prefill has the offer; its turn has not come. From now on decode asks instead of repeating the offer."""

    room: bytes
    attempt: int


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Is the offer still queued? Answered with Queued, Starting, or Failed if prefill no longer has it."""

    room: bytes
    attempt: int


class AskLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Decode has the prompt's log-probabilities before position `start`, which prefill may forget.

    What was told from there on is told again, or Failed if it is not kept any more. At the prompt's end nothing is.
    """

    room: bytes
    attempt: int
    start: int


class WriteBack(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Decode has the pages of a prompt and its answer. Prefill grants those that it lacks, or says nothing."""

    room: bytes
    attempt: int
    tokens: bytes
    """Prompt and answer, as far as whole pages of both sides go."""
    namespace: str
    next_turn_chance: float
    """Share, 0 to 1, of conversations like this one that had another turn."""


class Starting(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Prefill planned the first step of a room: decode answers with Grant."""

    room: bytes
    attempt: int
    cached_len: int
    """Tokens prefill took from its own tree."""


class Component(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What the writer must fill of one pool: the prompt's pages from index `first` on."""

    pool: int
    first: int
    pages: bytes
    """The reader's pages, in order of the prompt."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Permission to write: ticket and coverage. Repeated until Done or Failed; zero pages is an ordinary case.

    Pages of the prompt are counted in the reader's size, here and in Done.
    """

    room: bytes
    attempt: int
    ticket: int
    coverage: tuple[Component, ...]
    """What to write, one component per pool."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The prompt's pages [first, end) of one pool."""

    pool: int
    first: int
    end: int
    checksums: bytes = b""
    """Packed crc32 of each page; empty when verification is off."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One chunk has landed. Travels as the notification bound to its data, so it is evidence at the reader."""

    ticket: int
    reader_boot: int
    writer_boot: int
    chunk: int
    pieces: tuple[Piece, ...]
    """What landed: at most one piece of each pool, in order of the pools."""
    payload: bytes | None = None
    """The first token, encoded; only the last chunk bears it. Its write was posted after all others were seen DONE."""

    @property
    def is_last(self) -> bool:
        return self.payload is not None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Prefill cannot (go on to) serve a room's attempt."""

    room: bytes
    attempt: int
    reason: FailReason
    message: str


class Revoke(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Decode withdraws a ticket: close the gate, answer Drained when nothing is outstanding. Repeated."""

    ticket: int


class Draining(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """First answer to Revoke while writes are outstanding, repeated until Drained: no time limit but silence."""

    ticket: int
    bytes_outstanding: int


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Answer to a repeated Grant whose ticket's every byte was seen DONE: its announcements are there, or lost."""

    ticket: int


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Answer to Revoke, without a time limit. An unknown ticket answers CLEAN and leaves a tombstone."""

    ticket: int
    outcome: Drain


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The room is over for the sender; `reason` is told to nobody else."""

    room: bytes
    reason: FailReason


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The front found a stop string: keep this many output tokens, commit, release."""

    room: bytes
    output_len: int


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An operator asks every worker to drop what no lease protects from its tree. The events that follow tell what."""


class ChangeRole(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An operator gives a worker another role: it drains, and goes on under a new boot over the old memory. Repeated
    until a Hello says the new role."""

    role: Role
    grace_ms: int
    """Time until what still runs is handed to another worker."""


class AskTree(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An operator looks at what a tree holds. Answered with TreeShape; nothing is touched by it."""

    max_nodes: int
    """Most nodes that the answer is to have."""


class TreeNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node of a tree, of which no text is told."""

    parent: int | None
    """Place of its parent in the list; None: it is a root, which holds no pages itself."""
    label: str
    """Hash of the path up to the node's end, in hexadecimal digits; of a root whose tree it is."""
    num_pages: int
    num_below: int
    """Pages of the node and of all that was seen below it, those included that are not in the list."""
    num_leases: int
    """Leases of it or below it: none of its pages can be evicted while there is one."""
    is_kept: bool
    """Whether a client asked to keep it for a while."""
    rooms: tuple[bytes, ...]
    """Some of the requests whose lease ends here."""


class TreeShape(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What a tree holds: first what is leased or kept, then the largest subtrees."""

    page_size: int
    num_pages: int
    """Pages of the whole tree, be they in the list or not."""
    nodes: tuple[TreeNode, ...]
    """Parents stand before their children."""
    num_seen: int
    """Nodes that were looked at; those of them that are not in the list are counted in `num_below`."""
    num_unseen: int
    """Nodes at whose pages, and at what is below them, nobody looked: a look is bounded."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decided which side computes a prompt, in tokens (engine/near.py)."""

    missing_len: int
    """Tokens of the prompt that decode's tree had no KV of."""
    filed_len: int
    """Tokens among these that the file under it had. 0: none, or nobody knew what loading takes."""
    load_len: int
    """What loading those was taken to take."""
    backlog_len: int
    """Tokens of other prompts that decode had still to compute."""
    num_rows: int
    """Rows of decode that drew tokens."""
    pace_alone: float
    """Time of a token of a prompt on decode, over that of one on prefill."""
    pace_beside: float
    """The same beside other work of decode."""
    pace_of_row: float
    """What each row waits longer for it."""
    most_len: int
    """Most tokens of one prompt that decode computes on cores of its own."""
    cores: Cores
    way: PrefillWay
    """What spoke against prefill, as far as decode knew better than the front."""
    local_wait_len: int
    """What computing it on decode was taken to cost, in tokens of prefill's pace."""
    prefill_wait_len: int
    """What prefill would compute until the prompt were handed over."""
    pull_wait_len: int
    """The same with a pull from decode before; 0: there would be nothing to pull."""
    is_near: bool
    """Whether decode computed it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Where a request's prompt came from, and how long each part took (seconds)."""

    prompt_len: int
    output_len: int
    decode_cached_len: int = 0
    prefill_cached_len: int = 0
    decode_loaded_len: int = 0
    """What of `decode_cached_len` came for this prompt from the file under the tree."""
    prefill_loaded_len: int = 0
    prefill_pulled_len: int = 0
    """What of `prefill_cached_len` prefill pulled from decode for this prompt."""
    num_retractions: int = 0
    transferred_bytes: int = 0
    transferred_state_bytes: int = 0
    """Bytes among `transferred_bytes` that were recurrent states."""
    weighed: Weighed | None = None
    """How it was decided which side computes the prompt; None: that was no question."""
    num_rounds: int = 0
    """Steps in which guesses at its next tokens were verified."""
    num_drafts: int = 0
    """Guesses verified in those rounds."""
    num_accepted: int = 0
    """Guesses that verification accepted."""
    queue_s: float = 0.0
    """Time from submission until prefill began."""
    prefill_s: float = 0.0
    """Time from the beginning of prefill until the last page had landed on decode."""
    transfer_s: float = 0.0
    """Part of `prefill_s` from the grant on: pages move while the prompt is computed. All of it when granted at
    once."""
    decode_queue_s: float = 0.0
    """Time from the landing of the last page until decode ran the request."""
    first_token_s: float = 0.0
    """Time from submission until the first token."""
    hints: tuple[HintAnswer, ...] = ()
    """What became of each hint that was given."""
    worker_wait_s: float = 0.0
    """Part of `first_token_s` in which no worker had the request: one that was needed was away."""


class TokenRun(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Output tokens [start, start + n) of a room."""

    room: bytes
    epoch: int
    """Epoch of the Submit it answers. If an earlier one: drawn before decode knew what the front has, and not used."""
    start: int
    tokens: bytes
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage | None = None
    """Where the prompt came from; only with the first token that this worker drew, and not when a run is told again."""


class StreamPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A room in a list of those that get one token each."""

    room: bytes
    epoch: int
    """As in TokenRun."""
    start: int
    """Output position of its token, less `NextTokens.ahead`."""


class NextTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One further output token of each of some rooms: of those that decode on and on, in one piece."""

    places: tuple[StreamPlace, ...]
    ahead: int
    """Steps since this list was made. It stays the same while its rooms go on."""
    tokens: bytes
    """Packed ids, one of each room."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All rooms of one front that got tokens in one step: first the runs, then the others."""

    runs: tuple[TokenRun, ...] = ()
    next: NextTokens | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Last message about a room. `finish` for a complete answer, else `reason`."""

    room: bytes
    epoch: int
    """Epoch of the Submit it answers, as in TokenRun."""
    usage: Usage
    finish: FinishReason | None = None
    reason: FailReason | None = None
    message: str = ""
    retryable: bool = False
    """Another try may do better: the room may be submitted again."""


MAX_LOGPROB_POSITIONS = 2048
"""Most positions in one PromptLogprobs: with 20 alternatives each it stays below the limit of a frame of its kind."""


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Log-probabilities of prompt positions [start, start + n), from prefill through decode to the front.

    A chunk's may need several. Prefill keeps them for a while: decode asks for what it lacks (AskLogprobs).
    """

    room: bytes
    start: int
    values: tuple[TokenLogprobs, ...]


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Load of an instance, for routing and health. Sent to the front with each heartbeat."""

    num_waiting: int
    waiting_tokens: int
    num_running: int
    free_pages: tuple[int, ...]
    evictable_pages: tuple[int, ...]
    quarantined_pages: tuple[int, ...]
    num_pages: tuple[int, ...]
    prefill_tokens_per_s: float
    decode_step_s: float
    handover_s: float | None = None
    """Seconds that a prompt's hand-over to this worker takes besides its bytes. None: not measured."""
    byte_s: float | None = None
    """Seconds of each byte of it. None: not measured."""
    draining: bool = False
    ready: bool = True
    open_tickets: int = 0
    leases: int = 0
    metrics: dict[str, float] = {}
    """Everything the instance counts: `name{label="x"}` |-> value, for the front's /metrics."""


class Events(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What entered and left a tree since the last one. A gap in `first` or a new boot asks for a snapshot.

    The front asks by repeating its Hello: a worker answers every Hello of a front with its own Hello, then a snapshot.
    """

    first: int
    """Number of the first event of this message; each stored or evicted key counts one. Of a snapshot, whose keys count
    nothing: the number of the next event."""
    stored: bytes
    """Packed keys of the pages that entered; of the whole tree in a snapshot."""
    evicted: bytes
    snapshot: bool = False
    """Whether `stored` is the whole tree, and what was known before is to be forgotten."""


Message = (
    Hello
    | Heartbeat
    | Submit
    | Offer
    | Queued
    | Ask
    | AskLogprobs
    | Starting
    | Grant
    | Done
    | Failed
    | Revoke
    | Draining
    | Sent
    | Drained
    | WriteBack
    | Status
    | Cancel
    | Finish
    | Flush
    | ChangeRole
    | AskTree
    | TreeShape
    | Tokens
    | Finished
    | Events
    | PromptLogprobs
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every frame carries besides its message."""

    src: str
    """Name of the sending instance."""
    src_boot: int
    dst_boot: int | None
    """Boot of the addressee; None only for Hello: the other side's boot is not known yet."""
    closed_below: int = 1
    """Tickets below this number are closed for good: tombstones of them may be forgotten. Decode tells prefill."""
    body: Message
