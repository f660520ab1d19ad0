"""What every engine is made of, built from its config: pools, tree, budget, scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.block_log import BlockLog
from deltaserve.control.cache.eviction import KvEviction
from deltaserve.control.cache.pages import PageEvent, PageState
from deltaserve.control.cache.prefix_cache import PrefixCache, StateEviction
from deltaserve.control.cache.tree_changes import FiledEventLog
from deltaserve.control.engine.api import InstanceConfig
from deltaserve.control.engine.tiering import TierConfig, Tiering
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.scheduler import Scheduler
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import Role
from deltaserve.core.keys import seed_check
from deltaserve.core.wire.messages import Facts

_MAX_BLOCKS = 1 << 16
"""Pages whose changes are kept between two tellings, a tenth of a second."""
_PAGE_STATES = tuple((state, state.name.lower()) for state in PageState)
"""Each page state with its name in metrics."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One engine's memory and scheduler."""

    pools: tuple[PagePool, ...]
    cache: PrefixCache
    budget: Budget
    scheduler: Scheduler
    tiering: Tiering | None = None
    """What is copied to and from the file under the tree; None: there is no file."""
    lacks_file: bool = False
    """There should be one."""


def build_parts(config: InstanceConfig) -> Parts:
    pools = tuple(PagePool(num_pages) for num_pages in config.num_pages)
    options = config.options
    blocks = BlockLog(_MAX_BLOCKS) if options.tells_blocks else None
    states, kv = StateEviction(options.state_eviction), KvEviction(options.kv_eviction)
    log = FiledEventLog(blocks) if config.tier_slots else None
    cache = PrefixCache(config.cache.page_size, pools, config.cache.pools, states, blocks, kv, log)
    budget = Budget(cache, pools)
    scheduler = Scheduler(sched_config(config), cache, budget, config.seed_of)
    tiering = None
    if log is not None:
        tier_config = TierConfig(config.tier_slots, config.page_bytes, log)
        tiering = Tiering(tier_config, pools, cache, budget, scheduler)
    return Parts(pools, cache, budget, scheduler, tiering, config.lacks_file)


def take_over_parts(former: Parts, config: InstanceConfig) -> Parts:
    """The same memory, tree and rows, scheduled as another engine does. Raises StateError unless all is idle."""
    former.scheduler.become(sched_config(config))
    return former


def sched_config(config: InstanceConfig) -> SchedConfig:
    """What of the options is of the role: prefill keeps no room for decode tokens and guesses nothing, and decode alone
    takes in little beside its rows."""
    options, page_size = config.options.sched, config.cache.page_size
    has_head = config.cache.draft_group is not None
    is_prefill = config.role is Role.PREFILL
    if is_prefill:
        options = replace(options, reserve_len=0, step_target_s=None, max_drafts=0)
    beside = options.extend_len_beside_decode if config.role is Role.DECODE else None
    plans_ahead = not has_head and (config.computes_beside or not is_prefill)
    options = replace(
        options,
        extend_len_beside_decode=None if beside is None else max(page_size, beside),
        num_ahead=options.num_ahead if plans_ahead else 0,
    )
    return SchedConfig(
        **asdict(options),
        page_size=page_size,
        max_running=config.max_running_requests,
        plans_behind_prompts=config.computes_beside,
        ends_with_prompt=is_prefill,
        drafts_take_places=has_head,
    )


def facts_of(config: InstanceConfig) -> Facts:
    """The config's facts, as announced in a Hello."""
    return Facts(
        page_size=config.cache.page_size,
        kv_dtypes={group.name: group.dtype.value for group in config.cache.groups},
        has_staging=config.has_staging,
        needs_equal_pages=not config.cache.keeps_all,
        pool_pages=config.num_pages,
        max_context_len=config.max_context_len,
        max_running=config.max_running_requests,
        vocab_size=config.vocab_size,
        keys_seed_check=seed_check(config.cluster_secret, config.fingerprint),
        group=config.group,
    )


def pool_metrics(parts: Parts) -> dict[str, float]:
    """Pages by state, tree pages by protection, leases, rows, and what shortage of memory has cost."""
    metrics: dict[str, float] = {}
    for index, pool in enumerate(parts.pools):
        for state, name in _PAGE_STATES:
            metrics[f'deltaserve_pages{{pool="{index}",state="{name}"}}'] = pool.count(state)
        evictable = parts.cache.evictable_pages(index)
        metrics[f'deltaserve_pages_evictable{{pool="{index}"}}'] = evictable
        metrics[f'deltaserve_pages_protected{{pool="{index}"}}'] = parts.cache.protected_pages(index)
        metrics[f'deltaserve_pages_usage{{pool="{index}"}}'] = 1 - (pool.num_free + evictable) / pool.num_pages
        num_flushed = parts.cache.num_flushed[index]
        metrics[f'deltaserve_pages_evicted_total{{pool="{index}"}}'] = pool.moves[PageEvent.EVICT] - num_flushed
        metrics[f'deltaserve_pages_flushed_total{{pool="{index}"}}'] = num_flushed
    metrics["deltaserve_pages_retired_total"] = parts.cache.num_retired
    metrics["deltaserve_pages_retained"] = parts.cache.num_retained
    metrics["deltaserve_leases"] = parts.cache.num_leases
    metrics["deltaserve_num_running_reqs"] = len(parts.scheduler.running)
    metrics["deltaserve_num_queue_reqs"] = len(parts.scheduler.waiting)
    metrics["deltaserve_blocked_need_pages"] = parts.scheduler.waiting.blocked_need
    metrics["deltaserve_admissions_blocked_total"] = parts.scheduler.waiting.num_blocked
    metrics["deltaserve_retractions_total"] = parts.scheduler.running.num_retractions
    speculation = parts.scheduler.steps.speculation
    metrics["deltaserve_speculation_rounds_total"] = speculation.totals.num_rounds
    metrics["deltaserve_drafts_verified_total"] = speculation.totals.num_verified
    metrics["deltaserve_drafts_accepted_total"] = speculation.totals.num_right
    metrics["deltaserve_drafts_right_share"] = speculation.right_share
    metrics["deltaserve_draft_price"] = parts.scheduler.running.step_target.cost.price or 0.0
    if parts.lacks_file:
        metrics["deltaserve_tier_slots"] = 0
    return metrics if parts.tiering is None else metrics | parts.tiering.metrics()


def check_parts(parts: Parts, requests: Iterable[Request]) -> None:
    """Raises IntegrityError unless the books of pools, tree, scheduler and of the rooms' requests agree."""
    parts.cache.check_integrity()
    parts.scheduler.running.check_integrity()
    if parts.tiering is not None:
        parts.tiering.check_integrity()
    holders = {*requests, *parts.scheduler.steps.ending}
    for index, pool in enumerate(parts.pools):
        owned = [page for r in holders if r.owned for page in r.owned[index]]
        owned += parts.tiering.owned(index) if parts.tiering is not None else []
        if pool.count(PageState.OWNED) != len(owned):
            raise IntegrityError(f"pool {index}: {pool.count(PageState.OWNED)} pages owned, {len(owned)} are held")
        if len(set(owned)) != len(owned) or not pool.are_all(owned, PageState.OWNED):
            raise IntegrityError(f"pool {index}: a request's page is another's, too, or not OWNED")
    for r in holders:
        if not r.num_finite <= r.num_computed <= r.num_pages * parts.cache.page_size:
            raise IntegrityError(f"{r.num_computed} tokens computed, {r.num_finite} finite, in {r.num_pages} pages")
    num_leases = sum(r.lease is not None for r in holders)
    if parts.cache.num_leases != num_leases:
        raise IntegrityError(f"{parts.cache.num_leases} leases, requests hold {num_leases}")
