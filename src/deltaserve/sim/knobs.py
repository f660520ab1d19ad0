"""One run's conditions, drawn from its seed: sizes, times, which faults and how often (BUGGIFY)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from deltaserve.control.cache.eviction import KvEviction
from deltaserve.control.cache.prefix_cache import StateEviction
from deltaserve.control.front.balance import POLICIES as BALANCE_METHODS
from deltaserve.control.sched.policy import POLICIES as SCHEDULE_POLICIES
from deltaserve.control.transfer.endpoint_config import MAX_WINDOWS
from deltaserve.control.transfer.ring import ALIGNMENT
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.transport import Evidence
from deltaserve.sim.chance import Chance
from deltaserve.sim.cluster import Shape, page_bytes, window_bytes
from deltaserve.sim.faults import (
    CLIENT_FAULTS,
    ENDPOINT_FAULTS,
    FRAME_FAULTS,
    PROCESS_FAULTS,
    RANK_FAULTS,
    SLOT_FAULTS,
    UNPROVEN_FAULTS,
    WRITE_FAULTS,
    FaultKind,
)
from deltaserve.sim.loopback import Mover

NAMESPACES = ("", "tenant-a", "tenant-b")
LEAST_DRAIN_S = 0.7
"""A writer that drains says so twice a second: whoever waits less takes it for silent."""
_SPECULATES = 0.25
"""Share of runs in which guesses at the next tokens, right ones and wrong ones, are verified."""
_OVERLAPS_DEEPLY = 0.5
"""How often, of those, two steps are planned behind the one that computes."""
_OVERLAPS = 0.4
"""Share of runs in which steps are planned while others compute."""
_SHARES_CORES = 0.9
"""How often, of those with late plans, steps are put off for prefill."""
_ONE_MACHINE = 0.3
"""How often, of those with conditional prefill, decode takes its cores for prefill's."""
_PLANS_LATE = 0.3
"""Share of runs in which the step behind one that computes is planned shortly before its end, as on the host."""
_PACED = 0.1
"""Share of runs in which rows and prompts are taken in as a target for the length of a step allows."""
_EXPERT_GROUPS = 0.05
"""Share of runs in which decode workers share experts."""
_ROLLOUTS = 0.06
"""Share of runs in which another revision takes over."""
_LOADED = 0.03
"""Share of runs that are long."""
_CROWDED = 0.25
"""Share of the long runs that are crowded."""
_SLOW_NETWORKS = 0.01
_WINDOW_S = (0.4, 0.9)
"""Seconds that a window takes there: two are under way at a time, and a writer that drains waits for both."""
_CARRIED_S = 15.0
"""Most seconds of all requests of a run on a network card, each sent once: the run waits a minute for their end."""
_IN_TIME = 0.9
"""Share of the time after which a write counts as failed that all those before it may take."""
_REQUEST_S = 5.0
"""Most seconds that one request may take a network card."""
_STAGED = 0.1
"""Share of runs in which workers have staging memory."""
_CUT = 0.85
"""Share of those in which staged writes are cut into several windows."""
_IDLE_RANKS = 0.03
_IDLE_RANKS_S = 2.0
"""Most that ranks which send nothing delay a prompt each way: they answer for each of its chunks."""
_SHORT_LIVES = 0.03
_TIERED = 0.35
"""Share of runs of models of one pool in which workers have a file under their trees."""
_SHORT_OF_MEMORY = 0.8
"""Share of those in which prompts evict each other."""
_COLLECTS = 0.1
"""Share of runs in which a turn of a worker may deal with several events."""
_FIRST_POLICIES = ("fcfs", "lpm")
"""Orders of waiting requests that are drawn with what else varies; later ones are drawn apart, so that a kept seed
keeps its meaning."""
_BY_PRIORITY = 0.1
"""Share of runs in which waiting requests are taken by priority."""
Pages = tuple[tuple[int, int, int], ...]
"""(tokens of a page, fewest and most pages of the largest request), equally likely."""
_PAGES: Pages = ((1, 6, 40), (4, 2, 14), (4, 2, 14), (4, 2, 14), (16, 1, 7), (16, 1, 7), (64, 1, 3))
_PAGES_CUT: Pages = ((32, 5, 10), (64, 3, 6))
"""Pages so large that a piece of one that goes to one rank fills a window (control/transfer/ring.py: ALIGNMENT), and so
many that a chunk is several windows."""
_MANY_PAGES: Pages = ((1, 12, 40), (4, 8, 16))
"""A prompt is many chunks of a page, among which its client may leave."""
_HIGHEST_RATE = {FaultKind.DUPLICATE: 0.2, FaultKind.OVERSIZE: 0.004, FaultKind.CORRUPT: 0.1}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the clients of a run ask."""

    num_requests: int
    window_s: float
    """Seconds within which the requests come."""
    largest: int
    """Tokens of prompt and output together, at most."""
    max_output: int
    share: float
    """Share of requests that start like an earlier one."""
    num_namespaces: int
    max_samples: int
    oddity: float = 1.0
    """Scales bad requests, short deadlines, bursts, bypasses."""
    num_callers: int = 0
    """Further clients, each of which asks again as soon as it is answered."""
    load_s: float = 0.0
    """Seconds for which those clients go on asking."""
    leaves: float = 0.0
    """Share of requests whose client leaves a moment after it has asked."""
    wishes: float = 0.0
    """Requests that ask for log-probabilities, those of the prompt too, or name stop ids: so many for each."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Everything that is fixed for one run."""

    shape: Shape
    traffic: Traffic
    rates: Mapping[FaultKind, float]
    events: tuple[tuple[int, FaultKind], ...]
    """Planned events: (number of the event before which it happens, what happens)."""
    step_s: float
    lag_s: float
    link_s: float
    land_s: float
    can_fence: bool
    """False: shared memory. Bytes land although the endpoint is gone; the supervisor restarts who cannot free pages."""
    late_starts: bool
    """Processes start in any order over a second, and are registered late."""
    moves: bool = False
    """A worker that starts again listens elsewhere."""
    misfits: float = 0.0
    """Share of the restarted workers that have another model at first."""
    flavours: int = 1
    """Tokens that may come next: which one it is differs from step to step, as bits do between batches."""
    bytes_per_s: float | None = None
    """What a worker's network card carries each way; None: as much as is wanted."""
    link_bytes_per_s: float | None = None
    """What a control connection carries each way; None: as much as is wanted."""
    sick: PeerName | None = None
    """The only process that faults strike; None: all of them."""
    slowness: float = 10.0
    """How much slower a process computes that SLOW_PROCESS strikes."""
    rank_lag_s: float = 0.0
    """What every rank behind the first is later than the one before it, each way."""
    fence_s: float = 0.0
    """How long an endpoint takes to be gone."""
    staging_pauses: int = 0
    """Slices of a gather or scatter that move nothing."""
    mixes_pages: bool = False
    """Pools hand out their pages in unequal orders."""
    mover: Mover = Mover.WRITER
    """READER: on one machine, where a reader copies and the writer's fence is an epoch."""
    reader_stops: float = 0.0
    """Share of writes that find their reader stopped before it has copied anything."""
    idle_rank_lag_s: float = 0.0
    """What ranks that send nothing are later than those that do, each way."""
    life_lag_s: float = 0.0
    """Connections of one life of a process may be slower than those of another by so much."""
    turn_s: float = 0.0
    """How long workers collect what arrives before they deal with it."""
    plans_late: bool = False
    """Whether the step behind one that computes is planned shortly before its end; else at once."""
    shares_cores: bool = False
    """Whether steps that only decode are put off while prefill is to have the cores. Only with `plans_late`."""
    slow_writes: bool = False
    """Writes take most of a second and nothing fails, so nobody may be fenced."""
    poisons: bool = True
    """Memory that changes hands is overwritten. False: what stood there stays, and looks as good as ever."""


def draw_knobs(seed: int) -> Knobs:
    """Conditions drawn from the seed: equal seeds, equal knobs."""
    knobs, chance = _draw(seed), Chance(seed, "drafts")
    if Chance(seed, "overlap").hits(_OVERLAPS):
        depth = 2 if Chance(seed, "depth of overlap").hits(_OVERLAPS_DEEPLY) else 1
        knobs = replace(knobs, shape=replace(knobs.shape, steps_ahead=depth))
    moments = Chance(seed, "moments of plans")
    if knobs.sick is None and moments.hits(_PLANS_LATE):
        # Behind shorter steps than that nothing is planned: see StepPace.
        knobs = replace(knobs, plans_late=True, step_s=max(knobs.step_s, moments.log_uniform(0.003, 0.02)))
        knobs = replace(knobs, shares_cores=moments.hits(_SHARES_CORES))
    pace = Chance(seed, "pace")
    if pace.hits(_PACED):
        # Rooms enter one by one: where each waits for staging memory that is too small, many outlast their deadlines.
        patience_s = min(knobs.shape.staging_patience_s, 0.5)
        target_s = pace.choose((0.0005, 0.002, 0.004))
        knobs = replace(knobs, shape=replace(knobs.shape, itl_target_s=target_s, staging_patience_s=patience_s))
    if knobs.shape.conditional_prefill and Chance(seed, "cores").hits(_ONE_MACHINE):
        knobs = replace(knobs, shape=replace(knobs.shape, shares_cores=True))
    if chance.hits(_SPECULATES):
        knobs = replace(knobs, shape=replace(knobs.shape, max_drafts=chance.choose((1, 3, 3, 7))))
    knobs = _with_a_rollout(_with_a_file(knobs, Chance(seed, "tier")), Chance(seed, "rollout"))
    return _with_all_windows_in_time(_with_a_later_policy(knobs, Chance(seed, "orders of queues")))


def _with_a_later_policy(knobs: Knobs, chance: Chance) -> Knobs:
    """Waiting requests are taken by priority. Not where all must go on quickly: some are to wait for others."""
    if knobs.sick is not None or not chance.hits(_BY_PRIORITY):
        return knobs
    policy = chance.choose(sorted(SCHEDULE_POLICIES.keys() - set(_FIRST_POLICIES)))
    return replace(knobs, shape=replace(knobs.shape, schedule_policy=policy))


def _with_a_file(knobs: Knobs, chance: Chance) -> Knobs:
    """A file under the trees, of a page or of as many as there ever are; in half of these runs slots are not what they
    should be, which no request may notice."""
    if not knobs.shape.radix_cache or not chance.hits(_TIERED):
        return knobs
    rates = dict(knobs.rates)
    if chance.hits(0.5):
        rates |= {kind: chance.log_uniform(0.01, 0.5) for kind in SLOT_FAULTS}
    shape = replace(knobs.shape, tier_slots=chance.choose((1, knobs.shape.prefill_pages // 2 + 1, 1000, 1000)))
    knobs = replace(knobs, shape=shape, rates=rates)
    is_plain = knobs.sick is None and not knobs.slow_writes and knobs.bytes_per_s is None
    return _short_of_memory(knobs, chance) if is_plain and chance.hits(_SHORT_OF_MEMORY) else knobs


def _short_of_memory(knobs: Knobs, chance: Chance) -> Knobs:
    """Prompts that begin alike and evict each other."""
    shape, few = knobs.shape, chance.below(4)
    pages = [-(-shape.context_len // size) + few for size in map(shape.page_size_of, (Role.PREFILL, Role.DECODE))]
    shape = replace(shape, prefill_pages=pages[0], decode_pages=pages[1], max_queued=64)
    traffic = replace(knobs.traffic, num_requests=chance.between(6, 14), share=0.9, max_samples=1)
    return replace(knobs, shape=shape, traffic=traffic)


def _with_a_rollout(knobs: Knobs, chance: Chance) -> Knobs:
    """Workers of another revision take over, while requests of many tokens come; in half of these runs some die."""
    is_plain = knobs.sick is None and not knobs.slow_writes and not knobs.shape.shares_experts
    if not chance.hits(_ROLLOUTS) or not is_plain or knobs.bytes_per_s is not None:
        return knobs
    shape = replace(knobs.shape, next_prefill=chance.between(1, 2), next_decode=chance.between(1, 2))
    traffic = replace(
        knobs.traffic,
        num_requests=chance.between(8, 16),
        window_s=chance.uniform(0.5, 4.0),
        max_output=chance.choose((6, 12, 24)),
    )
    events = knobs.events
    if chance.hits(0.5):
        crashes = [(int(chance.log_uniform(100, 2000)), FaultKind.CRASH) for _ in range(chance.between(1, 4))]
        events = _in_order([*events, *crashes])
    step_s = max(knobs.step_s, chance.log_uniform(0.003, 0.03))
    return replace(knobs, shape=shape, traffic=traffic, events=events, step_s=step_s)


def _draw(seed: int) -> Knobs:
    knobs, chance = _varied(draw_plain_knobs(seed, _pages(seed)), Chance(seed, "variety")), Chance(seed, "load")
    speed = Chance(seed, "speed of links")
    if speed.hits(0.15):  # a prompt, or a report of everything, takes some hundredths of a second
        knobs = replace(knobs, link_bytes_per_s=speed.log_uniform(5e4, 1e6))
    if chance.hits(_LOADED):
        loaded, crowds = _loaded(knobs, chance), Chance(seed, "crowds")
        return _crowded(loaded, crowds) if crowds.hits(_CROWDED) else loaded
    networks = Chance(seed, "slow networks")
    if networks.hits(_SLOW_NETWORKS):
        return _on_a_slow_network(knobs, networks)
    knobs = replace(knobs, shape=replace(knobs.shape, num_fronts=2)) if chance.hits(0.15) else knobs
    knobs = _with_acknowledged_contents(knobs, Chance(seed, "acknowledged contents"))
    knobs = _with_leaves(_with_changes(knobs, Chance(seed, "roles")), Chance(seed, "comings and goings"))
    knobs = _with_ranks(knobs, Chance(seed, "ranks"))
    knobs = _with_page_sizes(knobs, Chance(seed, "page sizes"))
    knobs = _with_staging(knobs, Chance(seed, "staging"))
    knobs = _with_several_windows(knobs, Chance(seed, "sizes of windows")) if _cuts_windows(seed) else knobs
    knobs = _with_trouble_of_ranks(knobs, Chance(seed, "trouble of ranks"))
    knobs = _with_copying_readers(knobs, Chance(seed, "copying readers"))
    knobs = _with_an_expert_group(knobs, Chance(seed, "expert group"))
    knobs = _with_idle_ranks(knobs, Chance(seed, "idle ranks"))
    knobs = _with_short_lives(knobs, Chance(seed, "short lives"))
    turns = Chance(seed, "turns")
    return replace(knobs, turn_s=turns.log_uniform(0.0002, 0.005)) if turns.hits(_COLLECTS) else knobs


def _pages(seed: int) -> Pages:
    if Chance(seed, "idle ranks").hits(_IDLE_RANKS):
        return _MANY_PAGES
    return _PAGES_CUT if _cuts_windows(seed) else _PAGES


def _cuts_windows(seed: int) -> bool:
    """Whether a run that has staging memory is one of those whose staged writes are cut into several windows."""
    return Chance(seed, "staging").hits(_STAGED) and Chance(seed, "several windows").hits(_CUT)


def _with_an_expert_group(knobs: Knobs, chance: Chance) -> Knobs:
    """Decode workers whose every step is one of all of them."""
    if not chance.hits(_EXPERT_GROUPS) or not knobs.can_fence:
        return knobs
    shape = replace(knobs.shape, num_decode=chance.between(2, 4), num_unified=0, decode_ranks=1, shares_experts=True)
    return replace(knobs, shape=shape, misfits=0.0)


def _with_copying_readers(knobs: Knobs, chance: Chance) -> Knobs:
    """The transport of one machine, in a fifth of the runs; its completions are proofs, and it can always be fenced."""
    if not chance.hits(0.2) or knobs.shape.evidence is not Evidence.COMPLETION or not knobs.can_fence:
        return knobs
    knobs = replace(knobs, mover=Mover.READER)
    if not knobs.rates or not chance.hits(0.7):
        return knobs
    # So that a writer fences who is stopped.
    shape = replace(knobs.shape, heartbeat_s=0.1, peer_suspect_s=0.2, peer_lost_s=0.3)
    traffic = replace(knobs.traffic, window_s=max(knobs.traffic.window_s, chance.uniform(1.0, 3.0)))
    return replace(knobs, shape=shape, traffic=traffic, reader_stops=chance.log_uniform(0.02, 0.5))


def _with_ranks(knobs: Knobs, chance: Chance) -> Knobs:
    """Workers of several ranks, which are not in step, in a tenth of the runs; more ranks than heads, too."""
    if not chance.hits(0.1):
        return knobs
    shape = replace(
        knobs.shape,
        num_heads=chance.choose((1, 2, 4)),
        prefill_ranks=chance.choose((1, 2, 4)),
        decode_ranks=chance.choose((1, 2, 4)),
    )
    lag_s = chance.choose((0.0, chance.log_uniform(0.0005, 0.1)))
    speed = knobs.bytes_per_s  # ranks share a card, and each sends heads that are replicated
    most = max(shape.prefill_ranks, shape.decode_ranks)
    return replace(knobs, shape=shape, rank_lag_s=lag_s, bytes_per_s=None if speed is None else speed * most)


def _with_page_sizes(knobs: Knobs, chance: Chance) -> Knobs:
    """Prefill and decode with pages of unequal sizes, in a tenth of the runs; one of them divides the other, or not."""
    if not chance.hits(0.1):
        return knobs
    shape = replace(knobs.shape, num_pools=1, more_pages=knobs.shape.more_pages[:1])
    size = chance.choose([size for size in (1, 2, 4, 6, 16, 48) if size != shape.page_size])
    pages = -(-shape.decode_pages * shape.page_size // size)
    return replace(knobs, shape=replace(shape, decode_page_size=size, decode_pages=pages))


def _with_staging(knobs: Knobs, chance: Chance) -> Knobs:
    """Staging memory on both sides, or one, of workers with unequal numbers of ranks, in a tenth of the runs.

    It may be too small for anything, or hold one write at a time.
    """
    if not chance.hits(_STAGED):
        return knobs
    ranks = chance.choose(((1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)))
    shape = replace(
        knobs.shape,
        num_heads=chance.choose((2, 4)),
        prefill_ranks=ranks[0],
        decode_ranks=ranks[1],
        staging_patience_s=chance.choose((0.05, 0.5, 2.0)),
        stall_s=max(1.0 + 2 * knobs.fence_s, knobs.shape.stall_s),  # a reader that waits for a fence scatters nothing
    )
    largest = shape.num_pools * (window_bytes(shape) + ALIGNMENT)
    sizes = [2 * max(ALIGNMENT, int(times * largest)) for times in (0.1, 1, 1, 1.5, 4)]
    prefill = chance.choose(sizes)
    decode = prefill if chance.hits(0.5) else chance.choose((0, *sizes))
    lag_s = chance.choose((0.0, chance.log_uniform(0.0005, 0.1)))
    lies = {FaultKind.WRONG_PLAN: chance.log_uniform(0.03, 0.4)} if knobs.rates and chance.hits(0.4) else {}
    speed = knobs.bytes_per_s  # padding and several ranks must not make a write last longer than it is waited for
    return replace(
        knobs,
        rates={**knobs.rates, **lies},
        bytes_per_s=None if speed is None else speed * max(ranks) * largest / window_bytes(shape),
        shape=replace(shape, prefill_staging_bytes=prefill, decode_staging_bytes=decode),
        rank_lag_s=lag_s,
        staging_pauses=chance.choose((0, 4, 16)),
    )


def _with_several_windows(knobs: Knobs, chance: Chance) -> Knobs:
    """A window is a page or a few, and a chunk has more."""
    pages = chance.between(3, 8)
    shape = replace(knobs.shape, window_bytes=ALIGNMENT * chance.choose((1, 1, 1, 2)))
    return replace(knobs, shape=replace(shape, chunk_len=pages * shape.page_size))


def _with_idle_ranks(knobs: Knobs, chance: Chance) -> Knobs:
    """Ranks that send nothing, since others hold the same heads, speak last; bytes come late and clients leave.

    What they say of a ticket is clean, and what the others said is not: completions prove nothing here.
    """
    if not chance.hits(_IDLE_RANKS) or knobs.shape.shares_experts:
        return knobs
    num_heads, prefill_ranks, decode_ranks = chance.choose(((1, 2, 1), (1, 4, 1), (1, 4, 2), (2, 4, 1)))
    shape = replace(
        knobs.shape,
        num_heads=num_heads,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        prefill_staging_bytes=0,
        decode_staging_bytes=0,
        chunk_len=knobs.shape.page_size,
        evidence=Evidence.CONTENTS,
        verify_checksums=True,
        drain_timeout_s=2.0,
        stall_s=1.0,
    )
    most_chunks = -(-knobs.traffic.largest // shape.chunk_len)
    return replace(
        knobs,
        shape=shape,
        traffic=replace(knobs.traffic, num_requests=chance.between(6, 12), leaves=chance.uniform(0.3, 0.9)),
        step_s=chance.log_uniform(0.01, 0.03),
        rates={**knobs.rates, FaultKind.COMPLETION_FIRST: chance.uniform(0.3, 0.9)},
        bytes_per_s=None,
        mover=Mover.WRITER,
        reader_stops=0.0,
        idle_rank_lag_s=min(chance.log_uniform(0.02, 0.3), _IDLE_RANKS_S / most_chunks),
        can_fence=True,
        poisons=True,
    )


def _with_short_lives(knobs: Knobs, chance: Chance) -> Knobs:
    """Workers that end again as soon as they have started, over connections of unequal speed: frames of several lives
    of one process are on their way at a time, and come in another order."""
    if not chance.hits(_SHORT_LIVES):
        return knobs
    loops = [(int(chance.log_uniform(20, 600)), FaultKind.CRASH_LOOP) for _ in range(chance.between(1, 2))]
    events = _in_order([*knobs.events, *loops])
    return replace(knobs, events=events, life_lag_s=chance.log_uniform(0.2, 3.0))


def _with_acknowledged_contents(knobs: Knobs, chance: Chance) -> Knobs:
    """Completions are no proof, but come behind the bytes, in half of such runs: pages may hold anything.

    What stood there may be the very bytes that are on their way.
    """
    if knobs.shape.evidence is not Evidence.CONTENTS or not chance.hits(0.5):
        return knobs
    rates = {kind: rate for kind, rate in knobs.rates.items() if kind not in UNPROVEN_FAULTS}
    return replace(knobs, rates=rates, poisons=chance.hits(0.5))


def _with_trouble_of_ranks(knobs: Knobs, chance: Chance) -> Knobs:
    """Faults of single ranks, in half of the runs that have several and are not calm.

    Not where a network is slow besides: together they take longer than the run waits for its end.
    """
    has_several = max(knobs.shape.prefill_ranks, knobs.shape.decode_ranks) > 1
    if not has_several or knobs == calm(knobs) or knobs.bytes_per_s is not None or not chance.hits(0.5):
        return knobs
    strikes = [(int(chance.log_uniform(20, 900)), chance.choose(RANK_FAULTS)) for _ in range(chance.between(1, 4))]
    return replace(knobs, events=_in_order([*knobs.events, *strikes]))


def _with_changes(knobs: Knobs, chance: Chance) -> Knobs:
    """Workers that change their roles, in an eighth of the runs, be they calm or not. No request may fail by it."""
    if not chance.hits(0.125):
        return knobs
    events = [*knobs.events, *((int(chance.log_uniform(20, 900)), FaultKind.ROLE) for _ in range(chance.between(1, 4)))]
    shape = replace(knobs.shape, num_prefill=2, num_decode=chance.between(2, 3))
    return replace(knobs, shape=shape, events=_in_order(events))


def _with_leaves(knobs: Knobs, chance: Chance) -> Knobs:
    """Workers that leave and join again, in an eighth of the runs, be they calm or not. No request may fail by it."""
    if not chance.hits(0.125):
        return knobs
    leaves = ((int(chance.log_uniform(20, 900)), FaultKind.LEAVE) for _ in range(chance.between(1, 4)))
    shape = replace(knobs.shape, num_prefill=2, num_decode=max(2, knobs.shape.num_decode))
    return replace(knobs, shape=shape, events=_in_order([*knobs.events, *leaves]))


def draw_plain_knobs(seed: int, pages: Pages = _PAGES) -> Knobs:
    """Conditions without what `_varied` adds."""
    chance, more = Chance(seed, "knobs"), Chance(seed, "more knobs")
    evidence = Evidence.CONTENTS if chance.hits(0.15) else Evidence.COMPLETION
    page_size, few, many = chance.choose(pages)
    largest = max(3, chance.between(few, many) * page_size - chance.below(page_size))
    shape = _shape(chance, page_size, largest, evidence)
    windows = Chance(seed, "windows")
    states = Chance(seed, "states")
    shape = replace(
        shape,
        state_chunk_len=states.choose((1, shape.page_size, 2 * shape.page_size, 3 * shape.page_size)),
        state_interval_len=states.choose((None, None, shape.page_size, 4 * shape.page_size)),
        kv_eviction=Chance(seed, "eviction").choose((KvEviction.LRU, KvEviction.LRU, KvEviction.SLRU)).value,
        state_eviction=states.choose([how.value for how in StateEviction]),
        writes_back=Chance(seed, "write backs").hits(0.85),
        peer_lost_s=more.choose((3.0, 10.0)) * shape.heartbeat_s,
        window_len=windows.between(1, max(1, largest)) if windows.hits(0.8) else 2 * largest,
        spare_pages=windows.choose((0, 2, shape.decode_pages)),
    )
    traffic = Traffic(
        num_requests=chance.between(2, 9),
        window_s=chance.log_uniform(0.01, 1.5),
        largest=min(largest, shape.context_len),
        max_output=chance.choose((2, 6, 12)),
        share=chance.choose((0.0, 0.5, 0.9)),
        num_namespaces=chance.choose((1, 1, 2, 3)),
        max_samples=chance.choose((1, 1, 2, 4)),
    )
    return Knobs(
        shape,
        traffic,
        rates=_rates(chance, evidence),
        events=_events(chance),
        step_s=chance.log_uniform(0.0005, 0.01),
        lag_s=chance.choose((0.0, 0.0005, 0.004, 0.03)),
        link_s=chance.log_uniform(0.0002, 0.005),
        land_s=chance.log_uniform(0.0002, 0.02),
        can_fence=not chance.hits(0.04),
        late_starts=chance.hits(0.2),
        moves=more.hits(0.2),
        misfits=0.5 if more.hits(0.25) else 0.0,
    )


def _varied(knobs: Knobs, chance: Chance) -> Knobs:
    """What makes one service unlike another; a quarter of the runs have none of it, a seventh no trouble at all."""
    if chance.hits(0.25):
        return knobs
    shape = replace(
        knobs.shape,
        more_pages=chance.choose(((), (0, 1 + chance.below(3)), (1 + chance.below(9), 0))),
        schedule_policy=chance.choose(_FIRST_POLICIES),
        load_balance_method=chance.choose(sorted(BALANCE_METHODS)),
        conditional_prefill=chance.hits(0.3),
    )
    events = list(knobs.events)
    events += [(int(chance.log_uniform(20, 900)), FaultKind.FLUSH) for _ in range(chance.choose((0, 0, 0, 1, 2)))]
    varied = replace(
        knobs,
        shape=shape,
        traffic=replace(knobs.traffic, wishes=chance.choose((0.0, 0.1, 0.4))),
        events=_in_order(events),
        rates={**knobs.rates, **{k: chance.log_uniform(0.02, 0.5) for k in ENDPOINT_FAULTS if chance.hits(0.15)}},
        bytes_per_s=window_bytes(shape) / chance.log_uniform(0.002, 0.2 * shape.stall_s) if chance.hits(0.2) else None,
        fence_s=chance.log_uniform(0.01, 2.0) if chance.hits(0.2) else 0.0,
        flavours=chance.choose((1, 2)),
        mixes_pages=True,
        # Contents prove nothing about a page that holds the same already: such a reader wipes what it grants.
        poisons=chance.hits(0.5) or shape.evidence is Evidence.CONTENTS,
    )
    varied = _with_as_many_as_are_carried(varied)
    return calm(varied) if chance.hits(0.2) else varied


def _with_all_windows_in_time(knobs: Knobs) -> Knobs:
    """A network on which no window counts as failed for those before it: at worst all of the run wait for each other,
    since a card that waits for the one at the other end carries nothing meanwhile."""
    if knobs.bytes_per_s is None or knobs.slow_writes:
        return knobs
    shape = knobs.shape
    num_workers = shape.num_prefill + shape.num_decode + shape.next_prefill + shape.next_decode
    num_windows = MAX_WINDOWS * num_workers * num_workers / 4  # roles may change
    least = num_windows * window_bytes(shape) / (_IN_TIME * shape.stall_s)
    return replace(knobs, bytes_per_s=max(knobs.bytes_per_s, least))


def _with_as_many_as_are_carried(knobs: Knobs) -> Knobs:
    """Fewer requests on a network that would carry so many for longer than the run waits for its end."""
    if knobs.bytes_per_s is None:
        return knobs
    longest_s = request_s(knobs)
    if longest_s > _REQUEST_S:
        knobs = replace(knobs, bytes_per_s=knobs.bytes_per_s * longest_s / _REQUEST_S)
    traffic, carried = knobs.traffic, int(_CARRIED_S / request_s(knobs))
    if carried >= traffic.num_requests * traffic.max_samples:
        return knobs
    num_samples = max(1, min(traffic.max_samples, carried))
    num_requests = max(1, carried // num_samples)
    return replace(knobs, traffic=replace(traffic, num_requests=num_requests, max_samples=num_samples, oddity=0.0))


def request_s(knobs: Knobs) -> float:
    """What the largest request takes a worker's network card."""
    if knobs.bytes_per_s is None:
        return 0.0
    num_pages = -(-knobs.traffic.largest // knobs.shape.page_size) * knobs.shape.num_pools
    return num_pages * page_bytes(knobs.shape) / knobs.bytes_per_s


def _loaded(knobs: Knobs, chance: Chance) -> Knobs:
    """Requests without end, and one process in trouble, of two each, that the others must not feel: memory for all."""
    shape, traffic = knobs.shape, knobs.traffic
    num_callers = chance.between(2, 5)
    pages = (num_callers + traffic.num_requests) * -(-traffic.largest // shape.page_size)
    shape = replace(
        shape,
        num_prefill=2,
        num_decode=2,
        num_unified=0,
        num_fronts=chance.choose((1, 2)),
        prefill_pages=2 * pages,
        decode_pages=2 * pages,
        spare_pages=None,
        max_running=8,
        max_queued=64,
        evidence=Evidence.COMPLETION,
        heartbeat_s=0.5,
        peer_suspect_s=1.5,
        peer_lost_s=5.0,
        peer_lease_s=5.0,
        drain_timeout_s=2.0,
    )
    traffic = replace(traffic, num_callers=num_callers, load_s=chance.log_uniform(2.0, 8.0), max_samples=1, oddity=0.0)
    kinds = [chance.choose(PROCESS_FAULTS) for _ in range(chance.between(1, 4))]
    kinds += [chance.choose(CLIENT_FAULTS) for _ in range(chance.choose((0, 2, 4)))]
    events = [(int(chance.log_uniform(50, 4000)), kind) for kind in kinds]
    return replace(
        knobs,
        shape=shape,
        traffic=traffic,
        rates={kind: rate for kind, rate in knobs.rates.items() if kind not in UNPROVEN_FAULTS},
        events=_in_order(events),
        sick=chance.choose([*shape.roles(), *shape.fronts()]),
        late_starts=False,
        bytes_per_s=None,
        can_fence=True,
    )


def _crowded(knobs: Knobs, chance: Chance) -> Knobs:
    """A decode worker that takes seconds for an answer, so that prompts for it wait on the prefill worker that it
    shares with a quick one."""
    num_callers = chance.between(4, 6)
    shape = replace(
        knobs.shape,
        num_prefill=1,
        max_running=chance.between(1, 2),
        chunk_len=knobs.shape.page_size,
        load_balance_method="round_robin",
        conditional_prefill=False,
    )
    pages = 2 * (num_callers + knobs.traffic.num_requests) * -(-knobs.traffic.largest // shape.page_size)
    shape = replace(shape, prefill_pages=pages, decode_pages=pages)
    return replace(
        knobs,
        shape=shape,
        traffic=replace(knobs.traffic, num_callers=num_callers, load_s=chance.uniform(6.0, 9.0)),
        rates={},
        events=((chance.between(20, 200), FaultKind.SLOW_PROCESS),),
        sick=chance.choose([name for name, role in shape.roles().items() if role is Role.DECODE]),
        step_s=chance.log_uniform(0.003, 0.01),
        slowness=100.0,
    )


def _on_a_slow_network(knobs: Knobs, chance: Chance) -> Knobs:
    """Writes take most of a second, and clients leave meanwhile; nothing fails, so nobody may be fenced (I27)."""
    shape = replace(
        knobs.shape,
        num_unified=0,
        evidence=Evidence.COMPLETION,
        drain_timeout_s=LEAST_DRAIN_S,
        stall_s=5.0,
    )
    few_pages = max(1, 16 // shape.num_pools)  # so that all is over in time
    traffic = replace(
        knobs.traffic,
        num_requests=chance.between(3, 6),
        largest=min(knobs.traffic.largest, few_pages * shape.page_size),
        max_samples=1,
        oddity=0.0,
    )
    leaves = [(int(chance.log_uniform(20, 400)), FaultKind.CLIENT_LEAVES) for _ in range(chance.between(2, 5))]
    slow_s = chance.uniform(*_WINDOW_S)
    knobs = replace(knobs, shape=shape, traffic=traffic, events=_in_order(leaves))
    slow_bytes_per_s = window_bytes(shape) / slow_s
    slow = replace(knobs, bytes_per_s=slow_bytes_per_s, link_bytes_per_s=None, can_fence=True, slow_writes=True)
    return calm(slow)


def calm(knobs: Knobs) -> Knobs:
    """The conditions without faults of workers and of what is between them: every request must be answered."""
    harmless = (*CLIENT_FAULTS, FaultKind.FLUSH, FaultKind.ROLE, FaultKind.LEAVE)
    events = tuple((number, kind) for number, kind in knobs.events if kind in harmless)
    shape = replace(knobs.shape, drain_timeout_s=max(knobs.shape.drain_timeout_s, LEAST_DRAIN_S))
    return replace(knobs, shape=shape, rates={}, events=events, late_starts=False, reader_stops=0.0)


def _shape(chance: Chance, page_size: int, largest: int, evidence: Evidence) -> Shape:
    smallest_pool = -(-largest // page_size)

    def pool() -> int:
        """Pages of a pool: as few as can be, or several times as many."""
        return smallest_pool + chance.below(4) if chance.hits(0.4) else smallest_pool * chance.between(2, 6)

    heartbeat_s = chance.choose((0.1, 0.2, 0.5))
    max_running = chance.choose((1, 2, 4, 8))
    return Shape(
        num_prefill=chance.choose((1, 1, 2)),
        num_decode=chance.choose((1, 1, 2)),
        num_unified=int(chance.hits(0.05)),
        page_size=page_size,
        num_pools=chance.choose((1, 2, 3)),
        prefill_pages=pool(),
        decode_pages=pool(),
        max_running=max_running,
        max_queued=chance.choose((1, 4, 16, 64)),
        chunk_len=page_size * chance.between(1, 8),
        context_len=largest,
        reserve_len=chance.choose((0, 1, 4, 16)),
        extend_len=chance.choose((0, 4, 100)),
        radix_cache=chance.hits(0.85),
        verify_checksums=evidence is Evidence.CONTENTS or chance.hits(0.7),
        evidence=evidence,
        heartbeat_s=heartbeat_s,
        peer_suspect_s=2 * heartbeat_s,
        peer_lease_s=chance.choose((3.0, 10.0)) * heartbeat_s,
        drain_timeout_s=chance.choose((0.05, 0.3, 2.0)),
        share_wait_s=chance.choose((0.05, 2.0)),
        stall_s=chance.choose((0.3, 1.0, 5.0)),
    )


def _rates(chance: Chance, evidence: Evidence) -> dict[FaultKind, float]:
    """Each kind is absent from most runs, and in some of them frequent."""
    num_active = chance.choose((0.0, 0.15, 0.3, 0.5))
    rates: dict[FaultKind, float] = {}
    if evidence is Evidence.CONTENTS:
        rates |= {kind: chance.log_uniform(0.02, 0.5) for kind in UNPROVEN_FAULTS}
    for kind in (*FRAME_FAULTS, *WRITE_FAULTS, FaultKind.NON_FINITE):
        if chance.hits(num_active):
            rates[kind] = chance.log_uniform(0.002, 1.0) * _HIGHEST_RATE.get(kind, 0.3)
    return rates


def _events(chance: Chance) -> tuple[tuple[int, FaultKind], ...]:
    """Deaths, pauses, partitions, clients that leave: before which event of the run."""
    num_events = chance.choose((0, 1, 1, 2, 4))
    kinds = [chance.choose(PROCESS_FAULTS) for _ in range(num_events)]
    kinds += [chance.choose(CLIENT_FAULTS) for _ in range(chance.choose((0, 1, 2, 4)))]
    numbers = [int(chance.log_uniform(20, 900)) for _ in kinds]
    return _in_order(zip(numbers, kinds, strict=True))


def _in_order(events: Iterable[tuple[int, FaultKind]]) -> tuple[tuple[int, FaultKind], ...]:
    """Planned events as a run meets them."""
    return tuple(sorted(events, key=lambda event: event[0]))
