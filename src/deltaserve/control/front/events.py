"""How the front's control plane is driven, by the router's asyncio adapter and by the simulator alike.

    actions = front.start(now)                   once
    actions = front.submit(generation, now)      raises RequestFailed when the sample is not taken
    actions = front.handle(event, now)           a frame, a death notice, a worker that came up
    actions = front.tick(now)                    when next_timer() has passed

The driver performs every returned action, in order. No call blocks, sleeps or looks at a clock.
"""

from dataclasses import dataclass

from deltaserve.control.front.client import OutputDelta
from deltaserve.control.peer.link import LinkAction, LinkEvent
from deltaserve.core.errors import RequestFailed
from deltaserve.core.ids import Boot, PeerName, Role, Room
from deltaserve.core.wire.messages import PeerAddress


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a delta to the room's client. A delta with `finish` is the room's one end."""

    room: Room
    delta: OutputDelta


@dataclass(frozen=True, slots=True)
class Fail:
    """The room ends without a complete answer: its one end."""

    room: Room
    error: RequestFailed


@dataclass(frozen=True, slots=True)
class TreesTold:
    """Every worker that was asked what its tree holds has answered, or is gone."""


FrontAction = LinkAction | Deliver | Fail | TreesTold


@dataclass(frozen=True, slots=True)
class Member:
    """A worker: what it does and where it listens."""

    name: PeerName
    role: Role
    url: str | None
    """Where it listens; None: whoever starts it will say, by WorkerUp. Until then it is neither dialled nor heard."""
    group: str | None = None
    """Name of its expert group, all of whose members compute every step together; None: it is in none."""

    @property
    def address(self) -> PeerAddress:
        """Raises ValueError while it is not known."""
        if self.url is None:
            raise ValueError(f"nobody has said yet where {self.name} listens")
        return PeerAddress(name=self.name, url=self.url)


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """Tells that a worker listens now: it is registered if new, dialled and sent a Hello at once."""

    member: Member


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """Tells that a worker is to serve no new rooms of this front, which forgets it when no room is on it any more.

    Rooms that are there end there, as far as they do within `grace_s`; later ones go on elsewhere, where there is an
    elsewhere. A WorkerUp of the same worker takes it back.
    """

    name: PeerName
    grace_s: float


@dataclass(frozen=True, slots=True)
class FlushAsked:
    """An operator wants every tree emptied of what no request holds."""


FrontEvent = LinkEvent | WorkerUp | WorkerLeaves | FlushAsked


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Everything the front's control plane needs to know. Plain numbers."""

    name: PeerName
    boot: Boot
    workers: tuple[Member, ...]
    """Known from the start, with or without their addresses; others may come by WorkerUp."""
    cluster_secret: bytes
    kv_bytes_per_token: float
    """Bytes a missing token costs on the wire, all ranks together."""
    tokenizer: str = ""
    """Hash of the front's tokenizer, chat template and end tokens: workers must say the same."""
    transfer_bytes_per_s: float = 4e9
    """Assumed of the ways between workers until they report what they measured."""
    prefill_tokens_per_s: float = 2000.0
    """Assumed of a prefill worker until it reports what it measured."""
    decode_step_s: float = 0.03
    """Assumed of a decode worker until it reports what it measured."""
    assumed_output_len: int = 256
    """Tokens a running request is assumed to produce in all: prices the wait for memory and rows on decode."""
    conditional_prefill: bool = False
    """Whether decode computes a short delta itself where the estimate says that it is sooner."""
    half: Role | None = None
    """Role of the one worker that the front speaks for, where somebody else chooses pairs and sends every request to
    both of a pair. DECODE: each names its prefill worker. PREFILL: the front tells when the worker's part of it is
    done. None: the front chooses."""
    load_balance_method: str = "ttft"
    """How pairs are chosen: a name in balance.POLICIES."""
    max_rooms: int = 4096
    max_waiting_tokens: int = 16 << 20
    """Prompt tokens of all rooms without a first token."""
    max_resident_keys: int = 1 << 20
    """Page keys remembered per worker."""
    heartbeat_s: float = 0.5
    peer_lost_s: float = 5.0
    """A worker silent for so long is lost, and with it what has begun there."""
    peer_suspect_s: float = 1.5
    """One whose connection broke is lost after so much silence; for others new rooms go elsewhere if they can."""
    come_back_s: float = 30.0
    """Time for which a worker that was in use and cannot be reached is expected back. One whose process is known to
    have ended is expected without limit: whoever said so starts it again."""
    stale_report_s: float = 1.0
    """Age from which on a worker's report fades to the mean of its kind."""
    hello_back_off_s: float = 2.0
    """Longest pause between two Hellos to a worker that does not answer."""
    meet_s: float = 5.0
    """Time that a request waits for the prefill worker that it names to answer; whoever named it can name another."""
    repeat_s: float = 5.0
    """A room decode says nothing of for so long is submitted again, which changes nothing where it is known."""
    echo_s: float = 1.0
    """Shortest pause between two Cancels for the same unknown room, and two requests for a snapshot."""

    @property
    def weighs_prompts(self) -> bool:
        """Whether decode may compute a prompt itself: not for half a request, since the other half waits until prefill
        has been asked for its part."""
        return self.conditional_prefill and self.half is None
