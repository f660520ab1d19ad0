"""A scheduler over a small cache, requests spelled as token ids, and an executor that only keeps page tables."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.pages import PageState
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.plan import ItemResult, PlanItem, Sampled, StepPlan, StepResult, TokenValues
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.scheduler import Scheduler
from deltaserve.control.sched.step_progress import StepProgress
from deltaserve.core.ids import Namespace, PageId, PoolId, Room, RowId, StepIndex
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32, token_len
from deltaserve.core.wire.messages import CacheUse

SPACE = Namespace("alice")
_rooms = itertools.count(1)


def seed_of(namespace: Namespace, page_size: int = 4) -> bytes:
    return seed_key(b"secret", "model", page_size, namespace)


def make_request(
    prompt: Iterable[int],
    max_tokens: int,
    arrival: float = 0.0,
    page_size: int = 4,
    namespace: Namespace = SPACE,
    cache: CacheUse = CacheUse.NORMAL,
    prompt_logprobs: int | None = None,
) -> Request:
    """A request as an instance makes it: keys of the prompt's full pages included."""
    tokens = pack_u32(prompt)
    return Request(
        room=Room(next(_rooms).to_bytes(16, "little")),
        namespace=namespace,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs),
        prompt_len=token_len(tokens),
        tokens=bytearray(tokens),
        keys=bytearray(extend_keys(seed_of(namespace, page_size), tokens, page_size)),
        arrival=arrival,
        deadline=arrival + 60.0,
        cache=cache,
    )


def taken_pages(pages: Sequence[Sequence[PageId]]) -> tuple[list[PageId], ...]:
    """Pages as a request owns them."""
    return tuple(list(of_pool) for of_pool in pages)


@dataclass
class Tables:
    """The executor's half of a plan: page tables, tokens and states; refuses plans that do not add up."""

    retentions: tuple[Retention, ...]
    page_size: int
    rows: dict[RowId, list[list[PageId | None]]] = field(default_factory=dict)
    tokens: dict[RowId, bytearray] = field(default_factory=dict)
    drawn: dict[RowId, tuple[StepIndex, int]] = field(default_factory=dict)
    states: dict[tuple[int, PageId], bytes] = field(default_factory=dict)
    """(pool, slot) |-> the tokens that the state in it has taken in."""

    def apply(self, plan: StepPlan) -> None:
        for row in plan.closes:
            del self.rows[row], self.tokens[row]
        for opened in plan.opens:
            assert opened.row not in self.rows, "a row is opened twice"
            self.rows[opened.row] = [[] for _ in self.retentions]
            self.tokens[opened.row] = bytearray(opened.tokens)
        for update in plan.pages:
            table = self.rows[update.row][update.pool]
            hole = update.first_index - len(table)
            assert update.pool > 0 or hole <= 0, "a hole in a page table"
            table.extend([None] * hole)
            table[update.first_index : update.first_index + len(update.pages)] = update.pages
        for item in plan.items:
            inputs = self.inputs(item)
            assert token_len(inputs) == item.q_len > 0
            tokens = self.tokens[item.row]
            assert len(tokens) >= item.q_start * 4, "inputs leave a hole"
            known = inputs[: item.num_known * 4]
            tokens[item.q_start * 4 : (item.q_start + item.num_known) * 4] = known
            self.compute_states(item, item.q_start + item.num_known)

    def inputs(self, item: PlanItem) -> bytes:
        """Packed; one that was planned before it was drawn is what the row has drawn in that step."""
        if isinstance(item.inputs, TokenValues):
            return item.inputs.tokens
        step, token = self.drawn[item.row]
        assert step == item.inputs.step, "a token of another step"
        return pack_u32([token])

    def draw(self, step: StepIndex, row: RowId, token: int) -> None:
        """The last token that a row draws in a step."""
        self.drawn[row] = step, token

    def settle(self, item: PlanItem, num_right: int) -> None:
        """So many guesses of the item are right: its state has taken them in, too."""
        end = item.q_start + item.num_known + num_right
        tokens = self.tokens[item.row]
        tokens[item.q_start * 4 : end * 4] = self.inputs(item)[: (item.num_known + num_right) * 4]
        for pool, slot in self.written(item):
            self.states[pool, slot] = bytes(tokens[: end * 4])

    def written(self, item: PlanItem) -> Iterator[tuple[int, PageId]]:
        """(pool, slot) of the states that an item leaves."""
        for pool, kept in enumerate(self.retentions):
            if kept.lifetime is Lifetime.STATE:
                slot = self.rows[item.row][pool][(item.q_start + item.q_len - 1) // self.page_size]
                assert slot is not None
                yield pool, slot

    def compute_states(self, item: PlanItem, end: int) -> None:
        """Go on from the state before the item, which must be that of exactly those tokens, to position `end`."""
        table, tokens, size = self.rows[item.row], self.tokens[item.row], self.page_size
        for pool, kept in enumerate(self.retentions):
            if kept.lifetime is not Lifetime.STATE:
                continue
            if item.q_start:
                read = table[pool][(item.q_start - 1) // size]
                assert read is not None
                assert self.states[pool, read] == tokens[: item.q_start * 4], "a foreign state"
        for pool, slot in self.written(item):
            self.states[pool, slot] = bytes(tokens[: end * 4])


class Bench:
    """Pools, tree, scheduler and tables, stepped by hand."""

    def __init__(
        self,
        config: SchedConfig,
        num_pages: Sequence[int] = (64,),
        retentions: tuple[Retention, ...] = (KEEP_ALL,),
    ) -> None:
        self.pools = tuple(PagePool(count) for count in num_pages)
        self.cache = PrefixCache(config.page_size, self.pools, retentions)
        self.budget = Budget(self.cache, self.pools)
        self.scheduler = Scheduler(config, self.cache, self.budget, lambda ns: seed_of(ns, config.page_size))
        self.config = config
        self.tables = Tables(self.cache.retentions, config.page_size)
        self.started: dict[Request, int] = {}
        """Request |-> tokens that it took from the cache when it was admitted last."""
        self.most_states = 0
        """Pages of the last pool that were not free, at the most."""

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.waiting.add(request)

    def step(self, token: int = 7) -> tuple[StepPlan, list[StepProgress]]:
        """Admit at time 0, plan, answer every sampling row with `token`, commit."""
        for request in self.scheduler.waiting.admit(0.0):
            self.started[request] = request.num_computed
        plan = self.plan()
        self.most_states = max(self.most_states, self.pools[-1].num_pages - self.pools[-1].num_free)
        return plan, self.commit(plan, token)

    def plan(self) -> StepPlan:
        plan = self.scheduler.steps.plan()
        assert plan is not None
        self.tables.apply(plan)
        return plan

    def commit(self, plan: StepPlan, token: int = 7, seconds: float = 0.0) -> list[StepProgress]:
        items = tuple(ItemResult(i.row, (Sampled(token),) if i.samples else ()) for i in plan.items)
        for item in plan.items:
            if item.samples:
                self.tables.draw(plan.step, item.row, token)
        result = StepResult(plan.step, items, seconds=seconds).compact(plan)
        progress = [*self.scheduler.steps.commit(result)]
        for item in progress:
            self.scheduler.running.share_computed(item.request)
        self.scheduler.running.check_integrity()
        self.cache.check_integrity()
        return progress

    def used(self) -> tuple[int, ...]:
        """Pages of each pool that no request could have now, cached ones not counted."""
        return tuple(p.num_pages - p.num_free - p.count(PageState.CACHED) for p in self.pools)

    def check_empty(self) -> None:
        """Nothing is held: every page is free or evictable."""
        assert self.used() == (0,) * len(self.pools)
        assert self.cache.num_leases == 0
        assert all(self.cache.protected_pages(p) == 0 for p in range(len(self.pools)))
        self.scheduler.running.check_integrity()


def config(**changes: float) -> SchedConfig:
    """A small configuration: page 4, four rows, chunks of 8, steps of 16."""
    base = SchedConfig(
        page_size=4, max_running=4, chunk_len=8, step_len=16, split_tokens=8, reserve_len=0, state_chunk_len=4
    )
    return msgspec.structs.replace(base, **changes)


def q_lens(plan: StepPlan) -> list[int]:
    return [item.q_len for item in plan.items]


def page_lists(bench: Bench, request: Request) -> list[list[PageId | None]]:
    """Per pool: the pages the scheduler says a request has; None where it has given up its own."""
    lists: list[list[PageId | None]] = []
    for pool in map(PoolId, range(len(bench.pools))):
        held = held_pages(request, pool)
        lists.append([held.get(index) for index in range(max(held, default=-1) + 1)])
    return lists


def held_pages(request: Request, pool: PoolId) -> dict[int, PageId]:
    """Page index |-> page, of what a request has in one pool."""
    return {first + index: page for first, pages in request.spans(pool, 0) for index, page in enumerate(pages)}
