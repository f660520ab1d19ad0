"""The contract between the HTTP server and whatever serves it (router over sockets, or a fake in tests)."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from deltaserve.core.errors import FailReason
from deltaserve.core.hints import NO_HINTS, KvHints
from deltaserve.core.ids import Namespace, PeerName, Role, Room
from deltaserve.core.sampling import SamplingParams, TokenLogprobs
from deltaserve.core.wire.messages import CacheUse, FinishReason, PeerAddress, Status, TreeShape, Usage


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample to generate. n > 1 is n generations with n rooms."""

    room: Room
    prompt: bytes
    """Token ids of the prompt, packed."""
    namespace: Namespace
    sampling: SamplingParams
    deadline_s: float
    """Seconds from now until the answer must be complete."""
    cache: CacheUse = CacheUse.NORMAL
    prefill: PeerAddress | None = None
    """The one prefill worker that may compute the prompt, which somebody else chose; None: the front chooses."""
    hints: KvHints = NO_HINTS
    priority: int = 0
    """As `core/priority.py` says."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What arrived since the last delta. The last one carries `finish` and `usage`; the first token usually brings a
    `usage` too, of where its prompt came from, for whoever leaves before the end."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of prompt positions 1 .. len - 1, in pieces; complete before the first token."""
    finish: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers can take at all. None while no compatible pair is ready or expected back."""

    max_context_len: int
    max_prompt_len: int
    """Smallest pool over both sides, in tokens."""
    vocab_size: int
    max_total_len: int | None = None
    """Prompt plus output that fit the smallest pool that holds output. None: not told; the worker checks alone."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as the front knows it."""

    name: str
    role: str
    state: str
    """State of its link."""
    url: str | None = None
    """Where it listens; None: not known yet."""
    revision: str | None = None
    """Name of its revision: equal among workers that serve a request together. None: it has not told yet."""
    group: str | None = None
    """Name of its expert group, whose members compute every step together; None: it is in none."""
    leaving: bool = False
    refusal: str | None = None
    link_complaint: str | None = None
    """What keeps its link from being made, as far as its sockets tell; None: nothing that they tell."""
    breaker: str = "closed"
    rooms: int = 0
    """Rooms of this front placed there."""
    tokens_to_compute: int = 0
    """Prompt tokens of those rooms still to compute."""
    resident_keys: int = 0
    reports: int = 0
    """Reports that have come since this front began: where it stays, the last one is old."""
    status: Status | None = None
    """The worker's last report; None before the first one."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What /server_info and /metrics tell of the engine; names are those of the JSON."""

    rooms: int = 0
    rooms_without_worker: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of rooms without a first token."""
    draining: bool = False
    stale_frames: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Rooms by what became of them."""
    workers: tuple[WorkerStats, ...] = ()
    links: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the sockets by name."""
    internal_errors: int = 0
    integrity: str | None = None
    """Which books disagree; None: they do not."""
    stopped_processes: Mapping[PeerName, int] = field(default_factory=dict)
    """Worker |-> its process, which a signal or a debugger has stopped."""


@dataclass(frozen=True, slots=True)
class WorkerTree:
    """What one worker's tree holds."""

    name: str
    role: str
    shape: TreeShape | None
    """None: the worker, which is there, has not answered yet."""
    age_s: float = 0.0
    """Seconds since it told."""


class RoleAnswer(Enum):
    """Answer to a request for a worker to change its role."""

    HELD = "held"
    """The worker has that role already."""
    CHANGING = "changing"
    """The worker drains, and takes up that role then."""


class UnknownWorker(Exception):
    """There is no worker of that name. The message names those there are."""


class RoleRefused(Exception):
    """The worker cannot have that role now. The message says why, and what to do."""


class NameTaken(Exception):
    """Another worker of that name is in use. The message says where, and what to do."""


class Engine(Protocol):
    """Serves generations. All methods are called from the event loop's thread."""

    def generate(self, generation: Generation) -> AsyncIterator[OutputDelta]:
        """Deltas until one has `finish`. Closing the iterator early (`aclose`) cancels the room on every side.

        Raises RequestFailed when the request ends without a complete answer.
        """
        ...

    def finish(self, room: Room, output_len: int) -> None:
        """A stop string was found: keep `output_len` tokens, end the room."""
        ...

    def cancel(self, room: Room, reason: FailReason) -> None:
        """End a room from outside: its iterator raises RequestFailed with the reason. Nothing when it is over."""
        ...

    def flush_cache(self) -> dict[str, int]:
        """Every worker there is drops the pages no request holds: name |-> how many those were by its last report."""
        ...

    async def trees(self) -> tuple[WorkerTree, ...]:
        """What the trees of all workers hold that are there. Waits for their answers, a second at most."""
        ...

    def change_role(self, worker: str, role: Role, grace_s: float) -> RoleAnswer:
        """A worker drains and takes up another role over the same memory. What still runs after `grace_s` is moved.

        Raises UnknownWorker, RoleRefused.
        """
        ...

    def add_worker(self, worker: str, role: Role, url: str) -> None:
        """A worker is known to listen there: it is used as soon as it answers. Raises RoleRefused where one of its name
        has another role, NameTaken where one is in use that listens elsewhere."""
        ...

    def remove_worker(self, worker: str, grace_s: float) -> None:
        """A worker gets no new requests, and is forgotten when it has none; what still runs there after `grace_s` is
        moved, where there is anybody to take it. Raises UnknownWorker."""
        ...

    def limits(self) -> Limits | None: ...

    def alive(self) -> str | None:
        """What of the engine stands still; None: its own timers run. Says nothing about workers."""
        ...

    def ready(self) -> str | None:
        """None when a request admitted now would be served, else the reason, in words."""
        ...

    def refusal(self) -> str | None:
        """None when `generate` takes a request now, be it to wait for a worker that comes back; else the reason."""
        ...

    def stats(self) -> EngineStats:
        """Workers, queues and counts, now."""
        ...
