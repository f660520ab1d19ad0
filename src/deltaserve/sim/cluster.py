"""What the processes of a simulated cluster are started with: fronts, prefill and decode workers, the stamp model."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.engine.api import InstanceConfig, InstanceOptions
from deltaserve.control.front.events import FrontConfig, Member
from deltaserve.control.sched.sched_config import SchedOptions
from deltaserve.control.transfer.staging import StagingConfig, StagingMode
from deltaserve.core.ids import PeerName, RegionId, Role, Room
from deltaserve.core.layout.copy_plan import plan_cache
from deltaserve.core.layout.spec import CacheSpec
from deltaserve.core.lifetime import Retention
from deltaserve.core.transport import Evidence
from deltaserve.sim.oracle import FIRST_REVISION, stamp_spec
from deltaserve.sim.process import WINDOW_PAGES, PlaneSizes, SimWorker
from deltaserve.sim.rank_memory import STAMP_BYTES
from deltaserve.sim.world import boot_of

VOCAB = 97
SECRET = b"s" * 32
FRONT = PeerName("front")


@dataclass(frozen=True)
class Shape:
    """Sizes and times of a simulated cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    num_unified: int = 0
    num_fronts: int = 1
    next_prefill: int = 0
    next_decode: int = 0
    """Workers of a second revision, which come while the others leave."""
    page_size: int = 4
    decode_page_size: int | None = None
    """Tokens per page of decode and unified workers. None: as on prefill."""
    num_pools: int = 1
    """One that keeps everything; 2: beside it one with a window; 3: and one of recurrent states."""
    window_len: int = 9
    """Window of the second pool, in tokens."""
    spare_pages: int | None = None
    """Pages of each further pool beyond what one request needs; None: as many as the first pool has."""
    prefill_pages: int = 64
    decode_pages: int = 64
    more_pages: tuple[int, ...] = ()
    """Pool |-> pages beyond those; absent: none."""
    max_running: int = 8
    max_queued: int = 1024
    chunk_len: int = 8
    state_chunk_len: int = 4
    state_interval_len: int | None = None
    max_drafts: int = 0
    """Guesses verified in a step, of one row."""
    steps_ahead: int = 0
    itl_target_s: float | None = None
    """Target for the length of a step; a simulated step of so many tokens is said to take as many milliseconds."""
    kv_eviction: str = "lru"
    state_eviction: str = "lru"
    context_len: int = 200
    reserve_len: int = 4
    extend_len: int = 4
    radix_cache: bool = True
    verify_checksums: bool = True
    evidence: Evidence = Evidence.COMPLETION
    heartbeat_s: float = 0.5
    peer_lost_s: float = 5.0
    peer_suspect_s: float = 1.5
    peer_lease_s: float = 5.0
    drain_timeout_s: float = 2.0
    share_wait_s: float = 2.0
    stall_s: float = 5.0
    schedule_policy: str = "fcfs"
    load_balance_method: str = "ttft"
    conditional_prefill: bool = False
    shares_cores: bool = False
    """Decode and prefill are said to compute on the same cores."""
    writes_back: bool = False
    assumed_output_len: int = 16
    num_heads: int = 1
    prefill_ranks: int = 1
    decode_ranks: int = 1
    """Ranks of a decode or unified worker."""
    shares_experts: bool = False
    """The decode workers are one expert group."""
    prefill_staging_bytes: int = 0
    """Staging memory of each rank, half to send and half to receive. 0: none."""
    decode_staging_bytes: int = 0
    staging_patience_s: float = 2.0
    tier_slots: int = 0
    """Pages of each pool in the file under the tree of each worker. 0: there is none."""
    window_bytes: int | None = None
    """Most bytes of one post, where a page is not larger; None: a few pages."""

    @property
    def is_staged(self) -> bool:
        """Whether any worker has staging memory."""
        return bool(self.prefill_staging_bytes or self.decode_staging_bytes)

    def plane(self, role: Role) -> PlaneSizes:
        """Sizes of the data plane of each rank of a worker."""
        num_bytes = self.prefill_staging_bytes if role is Role.PREFILL else self.decode_staging_bytes
        region = RegionId(self.num_pools)
        staging = StagingConfig(region, num_bytes, StagingMode.ON, self.staging_patience_s) if num_bytes else None
        return PlaneSizes(self.stall_s, self.window_bytes, staging)

    def ranks_without_readers(self) -> frozenset[int]:
        """Ranks of a prefill worker that send nothing: others hold the same heads, and send them."""
        plan = plan_cache(
            self.cache_of(Role.PREFILL), self.prefill_ranks, self.cache_of(Role.DECODE), self.decode_ranks
        )
        return frozenset(rank for rank in range(self.prefill_ranks) if not plan.readers_of(rank))

    def roles(self) -> dict[PeerName, Role]:
        """Every worker with its role."""
        names = [(PeerName(f"prefill-{i}"), Role.PREFILL) for i in range(self.num_prefill)]
        names += [(PeerName(f"decode-{i}"), Role.DECODE) for i in range(self.num_decode)]
        names += [(PeerName(f"unified-{i}"), Role.UNIFIED) for i in range(self.num_unified)]
        return dict(names) | self.next_roles()

    def next_roles(self) -> dict[PeerName, Role]:
        """The workers of the second revision."""
        names = [(PeerName(f"next-prefill-{i}"), Role.PREFILL) for i in range(self.next_prefill)]
        return dict([*names, *((PeerName(f"next-decode-{i}"), Role.DECODE) for i in range(self.next_decode))])

    def fronts(self) -> list[PeerName]:
        return [FRONT, *(PeerName(f"front-{i}") for i in range(1, self.num_fronts))]

    def page_size_of(self, role: Role) -> int:
        return self.page_size if role is Role.PREFILL else self.decode_page_size or self.page_size

    def cache_of(self, role: Role) -> CacheSpec:
        return stamp_spec(self.page_size_of(role), self.num_pools, self.window_len, self.num_heads)

    def chunk_len_of(self, role: Role) -> int:
        """Tokens per chunk, rounded up to whole pages."""
        page_size = self.page_size_of(role)
        return -(-self.chunk_len // page_size) * page_size

    @property
    def pools(self) -> tuple[Retention, ...]:
        return self.cache_of(Role.PREFILL).pools

    def num_pages(self, role: Role) -> tuple[int, ...]:
        """Pages of each pool of a worker."""
        full = self.prefill_pages if role is Role.PREFILL else self.decode_pages
        pages = [full] * self.num_pools
        if self.spare_pages is not None:
            page_size, chunk_len = self.page_size_of(role), self.chunk_len_of(role)
            most = [kept.most_pages(self.context_len, chunk_len, page_size) for kept in self.pools]
            pages[1:] = [count + self.spare_pages for count in most[1:]]
        more = zip_longest(pages, self.more_pages[: self.num_pools], fillvalue=0)
        return tuple(count + extra for count, extra in more)


def page_bytes(shape: Shape) -> int:
    """Bytes of a page of any pool, on whoever has the larger pages."""
    return max(map(shape.page_size_of, Role)) * STAMP_BYTES


def window_bytes(shape: Shape) -> int:
    """Posted at once, at most: a few pages of one pool."""
    return (
        WINDOW_PAGES * page_bytes(shape) if shape.window_bytes is None else max(shape.window_bytes, page_bytes(shape))
    )


def worker_config(
    shape: Shape, name: PeerName, role: Role, life: int, revision: str = FIRST_REVISION
) -> InstanceConfig:
    chunk_len = shape.chunk_len_of(role)
    return InstanceConfig(
        name=name,
        role=role,
        boot=boot_of(name, life),
        cache=shape.cache_of(role),
        num_pages=shape.num_pages(role),
        max_running_requests=shape.max_running,
        max_context_len=shape.context_len,
        vocab_size=VOCAB,
        compat=(("fingerprint", revision),),
        cluster_secret=SECRET,
        fingerprint=revision,
        transport="loopback",
        evidence=shape.evidence,
        tp_size=shape.prefill_ranks if role is Role.PREFILL else shape.decode_ranks,
        tier_slots=(shape.tier_slots,) * shape.num_pools if shape.tier_slots else (),
        options=InstanceOptions(
            max_queued_requests=shape.max_queued,
            sched=SchedOptions(
                chunk_len=chunk_len,
                step_len=chunk_len * 4,
                split_tokens=shape.page_size_of(role) * 2,
                reserve_len=shape.reserve_len,
                extend_len_beside_decode=shape.extend_len,
                radix_cache=shape.radix_cache,
                policy=shape.schedule_policy,
                state_chunk_len=shape.state_chunk_len,
                state_interval_len=shape.state_interval_len,
                max_drafts=shape.max_drafts,
                num_ahead=shape.steps_ahead,
                step_target_s=shape.itl_target_s,
            ),
            shares_cores=shape.shares_cores,
            writes_back=shape.writes_back,
            kv_eviction=shape.kv_eviction,
            state_eviction=shape.state_eviction,
            verify_checksums=shape.verify_checksums,
            heartbeat_s=shape.heartbeat_s,
            peer_lost_s=shape.peer_lost_s,
            peer_suspect_s=shape.peer_suspect_s,
            peer_lease_s=shape.peer_lease_s,
            drain_timeout_s=shape.drain_timeout_s,
            share_wait_s=shape.share_wait_s,
        ),
    )


def url_of(name: PeerName, place: int = 0) -> str:
    """Where a worker listens: in its first place, or another one."""
    return f"sim://{name}/{place}"


def member_of(name: PeerName, role: Role, place: int = 0, shares_experts: bool = False) -> Member:
    group = "experts" if shares_experts and role is Role.DECODE else None
    return Member(name, role, url_of(name, place), group)


def front_config(shape: Shape, members: Iterable[Member], life: int, name: PeerName = FRONT) -> FrontConfig:
    return FrontConfig(
        name,
        boot_of(name, life),
        tuple(members),
        SECRET,
        kv_bytes_per_token=STAMP_BYTES * shape.num_pools,
        assumed_output_len=shape.assumed_output_len,
        load_balance_method=shape.load_balance_method,
        conditional_prefill=shape.conditional_prefill,
        heartbeat_s=shape.heartbeat_s,
        peer_lost_s=shape.peer_lost_s,
        peer_suspect_s=shape.peer_suspect_s,
    )


def room_of(number: int) -> Room:
    return Room(number.to_bytes(16, "little"))


def mix_pages(worker: SimWorker) -> None:
    """The later pools hand out their pages in another order, so that page ids of one pool are of no use in another."""
    for pool in worker.instance.parts.pools[1:]:
        pages = pool.allocate(pool.num_pages) or ()
        half = len(pages) // 2
        pool.free(pages[:half])
        pool.free(pages[half:])


_BUSY = (PageState.OWNED, PageState.GRANTED, PageState.QUARANTINED)


def held_by(worker: SimWorker) -> int:
    """Pages, pins, leases, rows and tickets that a worker holds for requests."""
    parts = worker.instance.parts
    pages = sum(pool.count(state) for pool in parts.pools for state in _BUSY)
    pins = sum(pool.num_pinned for pool in parts.pools)
    rows = len(parts.scheduler.running) + len(parts.scheduler.waiting)
    slots = 0 if parts.tiering is None else parts.tiering.num_busy_slots
    books = slots + parts.cache.num_leases + worker.instance.outflow.logprobs.num_numbers
    return pages + pins + rows + books + worker.instance.transfer_active()
