"""How a control plane is driven (by driver.py, in a worker's loop thread and in the simulator).

    instance.handle(event, now)              a frame, a transfer report, a death notice
    instance.commit(result, now)             the executor's answer to the last plan
    instance.tick(now)                       when next_timer() has passed
    actions = instance.turn(now)             once, after all of the above that were there
    plan = instance.plan(now)                when the executor is free; None: nothing to compute

Events are recorded as they come; admission, grants and outgoing frames are worked out once per turn, however many
events it has. The driver performs every action of a turn, in order. No call blocks, sleeps or looks at a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec

from deltaserve.control.cache.block_log import BlockChange
from deltaserve.control.peer.link import LinkAction, LinkEvent
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.control.sched.sched_config import SchedOptions
from deltaserve.control.transfer.commands import TransferCommand, TransferReport
from deltaserve.core.ids import Boot, Namespace, PeerName, Role
from deltaserve.core.keys import seed_key
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.transport import Evidence


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Stop taking requests; `is_drained()` turns true when the last one ended."""


@dataclass(frozen=True, slots=True)
class TellBlocks:
    """Tell whoever listens what entered and left the tree."""

    changes: tuple[BlockChange, ...]


Event = LinkEvent | DrainRequested | TransferReport

Action = LinkAction | TransferCommand | TellBlocks


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a control plane schedules and how long it waits: what an operator may choose."""

    sched: SchedOptions = SchedOptions()
    max_queued_requests: int = 1024
    kv_eviction: str = "lru"
    """Which pages are evicted first: a value of cache.eviction.KvEviction."""
    state_eviction: str = "lru"
    """Which state is evicted first: a value of cache.tails.StateEviction."""
    verify_checksums: bool = False
    heartbeat_s: float = 0.5
    peer_lost_s: float = 5.0
    """Silence of a prefill worker, seen by decode, after which its requests fail and it is fenced."""
    peer_suspect_s: float = 1.5
    """Silence since its connection broke after which a peer is taken for lost."""
    peer_lease_s: float = 5.0
    """Silence of a decode worker, seen by prefill, after which it is fenced and its pages are unpinned."""
    front_grace_s: float = 10.0
    """Silence of a front, seen by decode, after which its rooms are cancelled."""
    drain_timeout_s: float = 2.0
    """A peer silent for so long about a revoked ticket is fenced. While it drains it says so twice a second."""
    shares_cores: bool = False
    """Whether prefill workers that name rooms to this one compute on its cores."""
    writes_back: bool = False
    """Whether prefill takes the pages of answers from decode."""
    tells_blocks: bool = False
    """Whether pages that enter and leave the tree are told to others than our fronts."""
    share_wait_s: float = 2.0
    """Longest time that a request waits for another request's transfer of the same pages."""

    @property
    def weighs_work(self) -> bool:
        """Whether what is computed decides who computes a prompt, and not who waits for it. With a target for the time
        between tokens rows are not to wait for more than that allows."""
        return self.shares_cores and self.sched.step_target_s is None


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """Everything a control plane needs to know. Plain numbers: "auto" was resolved before."""

    name: PeerName
    role: Role
    boot: int
    cache: CacheSpec
    num_pages: tuple[int, ...]
    """Pages of each pool."""
    max_running_requests: int
    max_context_len: int
    vocab_size: int
    compat: tuple[tuple[str, str], ...]
    """Field |-> value; all must agree between prefill and decode."""
    cluster_secret: bytes
    fingerprint: str
    transport: str
    """Name of the transport; `evidence` says what its completions prove."""
    options: InstanceOptions
    evidence: Evidence = Evidence.COMPLETION
    tp_size: int = 1
    """Ranks, each of which holds its heads of every page."""
    computes_beside: bool = False
    """Its device computes beside the host: steps are planned behind those with prompts, too."""
    has_staging: bool = False
    """Each of them has memory in which elements are converted on the way."""
    tier_slots: tuple[int, ...] = ()
    """Pages of each pool that the file under the tree holds. Empty: there is none."""
    lacks_file: bool = False
    """There should be one, and it cannot be had."""
    group: str = ""
    """Where the members of its expert group meet, on several machines: nobody else could tell routers."""
    configured_role: Role | None = None
    """What the process was started as, once its role was changed; None: it never was."""

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each pool, of all ranks."""
        return tuple(self.tp_size * of_rank for of_rank in pool_page_bytes(self.cache, Shard(0, self.tp_size)))

    def seed_of(self, namespace: Namespace) -> bytes:
        """Key before that of a prompt's first page."""
        return seed_key(self.cluster_secret, self.fingerprint, self.cache.page_size, namespace)


class Instance(Protocol):
    """A control plane: prefill, decode or unified."""

    @property
    def role(self) -> Role: ...

    def misfits(self) -> Mapping[PeerName, str]:
        """Workers that pages cannot be moved to or from, and why: with both values of what differs."""
        ...

    def handle(self, event: Event, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def next_timer(self) -> float | None:
        """When tick() is wanted at the latest."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The step to compute after those that are not committed; None: nothing to compute, or one of them is to be
        committed first."""
        ...

    def commit(self, result: StepResult, now: float) -> None: ...

    def turn(self, now: float) -> list[Action]:
        """What the events since the last turn lead to."""
        ...

    def leaves_cores(self) -> bool:
        """Whether the next step would only decode, while more prompts of rooms here are with prefill than rows draw
        tokens: then what these lose is less than what those gain."""
        ...

    def transfer_active(self) -> bool:
        """Whether a ticket is open or a write outstanding: then the transfer thread keeps polling."""
        ...

    def is_drained(self) -> bool: ...

    def may_hand_over(self) -> bool:
        """Whether an engine of another role is to take over, and this one holds nothing for anybody any more."""
        ...

    def successor(self, boot: Boot) -> Self:
        """The engine that takes over: another role and boot, the same memory and tree. Drive it instead of this one.

        Precondition: may_hand_over().
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Name (Prometheus, with unit) |-> value; label sets as `name{label="x"}`."""
        ...

    def check_integrity(self) -> None:
        """Check that all accounts agree. Raises IntegrityError."""
        ...
