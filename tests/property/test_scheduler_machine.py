"""The scheduler under random traffic, against a small model that only knows tokens and page tables.

The model replays every plan into its own tables and compares them with the scheduler's requests; checks chunks,
budgets, rows, shared runs (by brute force over tables) and what a step may touch; and ends with everything given back.
Prompts are built of few letters, so that requests share prefixes and equal ones meet. Some are computed elsewhere: then
what of each pool is missing is granted, all or nothing, and lands whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.control.cache.pages import PageState
from deltaserve.control.sched.needs import Needs
from deltaserve.control.sched.plan import ItemResult, PlanItem, Sampled, StepPlan, StepResult, TokenOf
from deltaserve.control.sched.queue import TryOutcome
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.waiting import NoOwner
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace, PageId, PoolId, StepIndex
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.wire.messages import CacheUse
from tests.control.sched.sharing import check_runs, possible_positions, shared_positions
from tests.control.sched.toys import Bench, held_pages, make_request, page_lists

WINDOW = st.integers(1, 24)
SPARE = st.integers(0, 12)
NAMESPACES = st.sampled_from([Namespace("alice"), Namespace("bob")])


@st.composite
def configs(draw: st.DrawFn) -> SchedConfig:
    """Sizes small enough that every limit is met."""
    page_size = draw(st.sampled_from([1, 2, 4]))
    chunk_pages = draw(st.integers(1, 3))
    return SchedConfig(
        page_size=page_size,
        max_running=draw(st.integers(1, 4)),
        chunk_len=chunk_pages * page_size,
        step_len=max(draw(st.integers(1, 6)), chunk_pages) * page_size,
        split_tokens=draw(st.sampled_from([1, 2])) * page_size,
        reserve_len=draw(st.integers(0, 6)),
        radix_cache=draw(st.sampled_from([True, True, False])),
        state_chunk_len=draw(st.integers(1, 6)),
        state_interval_len=draw(st.sampled_from([None, None, 1, 8])),
        max_drafts=draw(st.sampled_from([0, 0, 1, 5])),
        num_ahead=draw(st.integers(0, 2)),
        step_target_s=draw(st.sampled_from([None, None, 2.0])),
        drafts_take_places=draw(st.booleans()),
        plans_behind_prompts=draw(st.sampled_from([False, True, True])),
        ends_with_prompt=draw(st.sampled_from([False, False, True])),
    )


@dataclass(frozen=True)
class Fetching(NoOwner):
    """Has pages sent here by `how`."""

    how: Callable[[Request, Needs], TryOutcome]

    def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
        return self.how(request, reserve)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        config=configs(),
        spare=st.tuples(SPARE, SPARE, SPARE),
        windows=st.lists(WINDOW, max_size=1),
        states=st.sampled_from([(), (Retention(Lifetime.STATE),)]),
    )
    def start(
        self, config: SchedConfig, spare: tuple[int, ...], windows: list[int], states: tuple[Retention, ...]
    ) -> None:
        """A pool that keeps everything, beside it one with a window, one of states; each may be as small as can be."""
        self.config = config
        self.max_len = 8 * config.page_size
        retentions = (KEEP_ALL, *(Retention(Lifetime.WINDOW, window_len) for window_len in windows), *states)
        sizes = zip(map(self.most, retentions), spare, strict=False)
        self.bench = Bench(self.config, [most + more for most, more in sizes], retentions)
        self.scheduler = self.bench.scheduler
        self.now = 0.0
        self.live: list[Request] = []
        self.left: list[Request] = []
        self.coming: dict[Request, tuple[list[range], tuple[list[PageId], ...]]] = {}
        """Granted: per pool, which page indexes are on their way, and into which pages."""
        self.landed: list[Request] = []
        self.in_flight: list[StepPlan] = []
        """The one that computes, the one planned behind it."""
        self.behind_prompts: set[StepIndex] = set()
        """Steps planned before what prompts had computed was in the tree."""
        self.ended_in_flight: list[Request] = []

    def most(self, kept: Retention) -> int:
        """Pages of the longest request."""
        return kept.most_pages(self.max_len, self.config.chunk_len, self.config.page_size)

    # ------------------------------------------------------------ traffic

    @rule(
        head=st.sampled_from(["", "a", "ab", "aab"]),
        tail=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.integers(1, 12),
        namespace=NAMESPACES,
        bypass=st.integers(0, 5),
        wants_logprobs=st.integers(0, 5),
        origin=st.sampled_from(Origin),
    )
    def add(
        self,
        head: str,
        tail: list[int],
        max_tokens: int,
        namespace: Namespace,
        bypass: int,
        wants_logprobs: int,
        origin: Origin,
    ) -> None:
        """At most as long as the smallest pool, as admission sees to."""
        page_size = self.config.page_size
        prompt = [ord(letter) for letter in head for _ in range(page_size)] + [7, *tail]
        prompt = prompt[: self.max_len - 1]
        request = make_request(
            prompt,
            min(max_tokens, self.max_len - len(prompt)),
            arrival=self.now,
            page_size=page_size,
            namespace=namespace,
            cache=CacheUse.NORMAL if bypass else CacheUse.BYPASS,
            prompt_logprobs=None if wants_logprobs else 0,
        )
        request.origin = origin
        self.now += 0.01
        self.live.append(request)
        self.scheduler.waiting.add(request)

    @rule(passed=st.sampled_from([0.0, 0.1, 2.0]))
    def admit(self, passed: float) -> None:
        self.now += passed
        waiting = list(self.scheduler.waiting.queue)
        free, coming = [pool.num_free for pool in self.bench.pools], list(self.coming)
        admitted = self.scheduler.waiting.admit(self.now, Fetching(self.fetch))
        assert set(admitted) <= {*waiting, *self.landed}
        self.scheduler.waiting.holders.take_yielded()
        landed, self.landed = self.landed, [request for request in self.landed if request not in admitted]
        for request in set(admitted) - set(landed):
            assert request.num_pages == -(-request.num_tokens // self.config.page_size)
            assert request.num_computed < request.num_tokens
            assert request.num_computed == (request.lease.num_tokens if request.lease else 0)
        if not admitted and list(self.coming) == coming:
            assert [pool.num_free for pool in self.bench.pools] == free

    # ------------------------------------------------------------ from elsewhere

    def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
        """As decode does: lease what is here, grant all that is missing, or nothing."""
        cache, size = self.bench.cache, self.config.page_size
        uses_tree = self.config.radix_cache and request.cache is CacheUse.NORMAL
        if request.lease is None:
            match = cache.match(request.namespace, request.tokens, request.keys, None if uses_tree else 0)
            request.lease = cache.lease_kv(match, request.num_tokens)
        elif uses_tree:
            request.lease = cache.lengthen(request.lease, request.tokens, request.keys)
        self.scheduler.waiting.hold(request)
        missing = []
        for pool, kept in enumerate(cache.retentions):
            end = -(-request.num_tokens // size)
            held = range(request.lease.first_page(pool), request.lease.num_pages)
            missing.append(range(held.stop if held else kept.first_needed(request.num_tokens, size), end))
            assert set(range(kept.first_seen(request.num_tokens, size), end)) <= {*held, *missing[-1]}
        needs = tuple(map(len, missing))
        if not self.scheduler.waiting.yield_to(request, needs, reserve):
            return TryOutcome.NO_ROOM
        pages = self.bench.budget.allocate(needs)
        assert pages is not None, "it was said to fit"
        self.scheduler.waiting.unhold(request)
        self.scheduler.waiting.enter(request)
        self.coming[request] = missing, pages
        return TryOutcome.TAKEN

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), token=st.integers(0, 2))
    def land(self, data: st.DataObject, token: int) -> None:
        self.land_one(data.draw(st.sampled_from(list(self.coming))), token)

    def land_one(self, request: Request, token: int) -> None:
        missing, pages = self.coming.pop(request)
        request.own(pages, [indexes.start for indexes in missing])
        request.num_computed = request.num_tokens
        for pool, kept in enumerate(self.bench.cache.retentions):
            if kept.lifetime is Lifetime.STATE and pages[pool]:
                self.bench.tables.states[pool, pages[pool][0]] = bytes(request.tokens)
        self.scheduler.running.share_computed(request)
        request.append(token)
        if request.output_len >= request.sampling.max_tokens:
            self.scheduler.finish(request)
            self.live.remove(request)
        else:
            self.scheduler.waiting.add_landed(request)
            self.landed.append(request)

    # ------------------------------------------------------------ steps

    @precondition(lambda self: not self.in_flight)
    @rule()
    def plan(self) -> None:
        before = {r: r.num_computed for r in self.scheduler.running}
        plan = self.scheduler.steps.plan()
        self.resume()
        if plan is None:
            assert not len(self.scheduler.running)
            return
        self.bench.tables.apply(plan)
        self.in_flight.append(plan)
        self.check_items(plan, before)
        running = {r.row for r in self.scheduler.running}
        assert self.bench.tables.rows.keys() == running
        self.check_tables(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def plan_behind(self) -> None:
        """A further step, whose rows go on behind what those before will draw. Nobody makes way for it."""
        last = self.in_flight[-1]
        if not self.scheduler.steps.has_work():
            self.no_more_plans()
            return
        assert not any(item.num_drafts for item in last.items)
        assert self.goes_behind_prompts or all(item.is_decode for item in last.items)
        running = [r for r in self.scheduler.running if r not in self.ended_in_flight]
        plan = self.scheduler.steps.plan()
        assert not self.scheduler.running.has_retracted
        if plan is None:
            return
        by_row = {r.row: r for r in running}
        for item in plan.items:
            request = by_row[item.row]
            under_way = [other for before in self.in_flight for other in before.items if other.row == item.row]
            count = sum(other.samples for other in under_way)
            if not count:
                assert item.q_start == max((one.q_start + one.q_len for one in under_way), default=request.num_computed)
                assert item.samples == (item.q_start + item.q_len == request.num_tokens)
                continue
            assert item.inputs == TokenOf(last.step)
            assert (item.q_start, item.q_len, item.samples) == (request.num_tokens + count - 1, 1, True)
            assert request.num_tokens + count < request.max_len, "behind a last token"
            assert not self.config.ends_with_prompt
        if any(not item.is_decode for before in self.in_flight for item in before.items):
            self.behind_prompts.add(plan.step)
        self.in_flight.append(plan)

    @property
    def goes_behind_prompts(self) -> bool:
        """Whether all pages are kept, too: what a chunk of a prompt needs is there before it is planned."""
        return self.config.plans_behind_prompts and len(self.bench.pools) == 1

    def no_more_plans(self) -> None:
        try:
            self.scheduler.steps.plan()
        except StateError:
            return
        raise AssertionError("a plan before the commit of the last one")

    def resume(self) -> None:
        for request in self.scheduler.running.take_retracted():
            assert (request.lease, request.owned, request.row) == (None, (), None)
            request.origin = Origin.COMPUTED
            self.scheduler.waiting.add(request)

    def check_items(self, plan: StepPlan, before: dict[Request, int]) -> None:
        by_row = {request.row: request for request in self.scheduler.running}
        assert len({item.row for item in plan.items}) == len(plan.items)
        num_extended = 0
        for item in plan.items:
            request = by_row[item.row]
            missing = request.num_tokens - request.num_computed
            assert item.q_start == request.num_computed == before[request]
            assert item.samples == (item.num_known == missing)
            first, end = item.q_start * 4, (item.q_start + item.num_known) * 4
            drafts = request.guesses.drafts[: item.num_drafts * 4]
            assert self.bench.tables.inputs(item) == bytes(request.tokens[first:end]) + drafts
            self.check_drafts(item, request)
            if missing > 1:
                num_extended += item.q_len
                assert item.q_len <= self.config.chunk_len
                assert item.samples or (item.q_start + item.q_len) % self.config.page_size == 0
        assert num_extended <= self.config.step_len
        decoding = {r.row for r in self.scheduler.running if r.num_tokens - r.num_computed == 1}
        assert decoding <= {item.row for item in plan.items}, "a decode row is left out"

    def check_drafts(self, item: PlanItem, request: Request) -> None:
        """Guesses stand behind a last token alone, none beyond the answer's end or a place where a state is kept."""
        assert item.num_drafts <= self.config.max_drafts
        if self.config.drafts_take_places and item.wanted_drafts:
            assert item.samples
            end = item.q_start + item.q_len + item.wanted_drafts  # of what a head writes if all guesses are right
            assert end <= request.max_len
            for index, kept in enumerate(self.bench.cache.retentions):
                held = held_pages(request, PoolId(index))
                assert kept.lifetime is Lifetime.STATE or held.keys() >= {(end - 1) // self.config.page_size}
        elif not self.config.drafts_take_places:
            assert item.wanted_drafts <= (self.config.max_drafts if item.samples else 0)
        if not item.num_drafts:
            return
        end = item.q_start + item.q_len
        assert item.is_decode
        assert end < request.max_len
        if self.scheduler.running.checkpoints is not None:
            assert item.q_start // self.config.grid_len == (end - 1) // self.config.grid_len

    def check_tables(self, plan: StepPlan) -> None:
        """The executor's tables are the scheduler's, for every row computed; runs are true; positions have a page."""
        tables, computed = self.bench.tables, {item.row for item in plan.items}
        running = {r.row: r for r in self.scheduler.running if r.row in computed and r.row is not None}
        lines = {row: page_lists(self.bench, request) for row, request in running.items()}
        for row, request in running.items():
            for mine, theirs in zip(tables.rows[row], lines[row], strict=True):
                assert all(  # a later plan tells what was grown since
                    page is None or known == page for known, page in zip(mine, theirs, strict=False)
                )
            if request not in self.ended_in_flight:
                assert tables.tokens[row] == request.tokens[: len(tables.tokens[row])]
        q_starts = {item.row: item.q_start for item in plan.items}
        for item in plan.items:
            assert len(tables.rows[item.row][0]) * self.config.page_size >= item.q_start + item.q_len
            self.check_pages(running[item.row], item.q_start, item.q_start + item.q_len)
        lines = {row: line[:1] for row, line in lines.items()}
        shared = {row: lines[row] for row in q_starts}
        split = self.config.split_tokens
        check_runs(plan.work.shared, shared, q_starts, self.config.page_size, split)
        decoding = {i.row: running[i.row] for i in plan.items if i.is_decode}
        leased = {row: r.lease.num_tokens if r.lease else 0 for row, r in decoding.items()}
        possible = possible_positions({row: lines[row] for row in decoding}, leased, self.config.page_size, split)
        shared_now = shared_positions(plan.work.shared)
        assert shared_now <= possible, "rows share more than their leases"
        assert shared_now == possible or plan.step in self.behind_prompts, "rows share less than their leases"

    def check_pages(self, request: Request, start: int, end: int) -> None:
        """What the positions [start, end) see and write is there, and not much more. The tables look into states."""
        size = self.config.page_size
        for index, kept in enumerate(self.bench.cache.retentions):
            held = held_pages(request, PoolId(index))
            first = (end - 1) // size if kept.lifetime is Lifetime.STATE else kept.first_seen(start, size)
            assert held.keys() >= set(range(first, -(-end // size)))
            assert len(held) == request.num_held(PoolId(index))
            places = self.config.max_drafts if self.config.drafts_take_places else 0
            most_len = request.num_tokens + self.config.max_drafts + places + self.config.num_ahead
            chunk_len = self.config.chunk_len + 2 * places + self.config.num_ahead * size
            assert len(held) <= kept.most_pages(most_len, chunk_len, size)

    @precondition(lambda self: self.in_flight)
    @rule(
        token=st.integers(0, 2),
        num_right=st.integers(0, 5),
        seconds=st.sampled_from([0.0, 1.0, 3.0]),
        is_compact=st.booleans(),
    )
    def commit(self, token: int, num_right: int, seconds: float, is_compact: bool) -> None:
        """A third of the time is that of a draft head."""
        plan = self.in_flight.pop(0)
        results = tuple(self.result(item, token, num_right) for item in plan.items)
        for item, result in zip(plan.items, results, strict=True):
            self.bench.tables.settle(item, max(0, len(result.drawn) - 1))
            if result.drawn:
                self.bench.tables.draw(plan.step, item.row, result.drawn[-1].token)
        answer = StepResult(plan.step, results, seconds=seconds, draft_seconds=seconds / 3)
        progress = [*self.scheduler.steps.commit(answer.compact(plan) if is_compact else answer)]
        assert not {p.request for p in progress}.intersection(self.ended_in_flight)
        for request in [r for r in self.ended_in_flight if not self.scheduler.steps.is_in_flight(r)]:
            assert (request.row, request.lease, request.owned) == (None, None, ())
            self.ended_in_flight.remove(request)
        planned = {item.row: item for item in plan.items}
        for did in progress:
            request = did.request
            assert request.row is not None
            done = planned[request.row]
            right = max(0, len(did.drawn) - 1)
            assert (did.computed_from, request.num_computed) == (done.q_start, done.q_start + done.num_known + right)
            if done.samples:
                assert request.num_computed == request.num_tokens - 1
            pages, is_in_flight = page_lists(self.bench, request), self.scheduler.steps.is_in_flight(request)
            self.scheduler.share_step(request, is_extend=did.is_extend)
            assert not is_in_flight or page_lists(self.bench, request) == pages, "a step under way reads them"
            if request.output_len >= request.sampling.max_tokens or (did.drawn and self.config.ends_with_prompt):
                assert not self.scheduler.steps.is_in_flight(request)
                self.scheduler.finish(request)
                self.live.remove(request)
        for behind in self.in_flight[:1]:
            self.bench.tables.apply(behind)
            self.check_tables(behind)

    def result(self, item: PlanItem, token: int, num_right: int) -> ItemResult:
        """The first `num_right` guesses are right, as far as there are so many; then `token`."""
        if not item.samples:
            return ItemResult(item.row)
        drafts = unpack_u32(self.bench.tables.inputs(item)[item.num_known * 4 :])
        drawn = (*drafts[:num_right], token)
        guesses = pack_u32([(token + place) % 3 for place in range(item.wanted_drafts)])
        return ItemResult(item.row, tuple(map(Sampled, drawn)), drafts=guesses)

    # ------------------------------------------------------------ endings

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        """Cancelled at any time: waiting, running, under a step."""
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        if request in self.coming:
            self.bench.budget.free(self.coming.pop(request)[1])
        if request in self.landed:
            self.landed.remove(request)
        under_way = self.scheduler.steps.is_in_flight(request)
        if under_way:
            self.ended_in_flight.append(request)
        pages = page_lists(self.bench, request)
        (self.scheduler.finish if keeps else self.scheduler.discard)(request)
        if under_way:
            held = page_lists(self.bench, request)  # by the request, or by its lease of what the tree has now
            assert held == pages, "pages of a running step were given away"
        else:
            assert (request.row, request.lease, request.owned) == (None, None, ())

    @precondition(lambda self: not self.in_flight and self.computed())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """As prefill does: the prompt is computed, its pages are still to be sent."""
        request = data.draw(st.sampled_from(self.computed()))
        self.scheduler.running.leave(request)
        self.live.remove(request)
        self.left.append(request)

    def computed(self) -> list[Request]:
        return [r for r in self.scheduler.running if r.output_len > 0]

    @precondition(lambda self: self.left)
    @rule()
    def sent(self) -> None:
        self.scheduler.finish(self.left.pop())

    # ------------------------------------------------------------ what always holds

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.running.check_integrity()
        self.bench.cache.check_integrity()
        holders = [*self.live, *self.left, *self.ended_in_flight]
        for index, pool in enumerate(self.bench.pools):
            owned = [page for r in holders if r.owned for page in r.owned[index]]
            owned += [page for _, pages in self.coming.values() for page in pages[index]]
            assert len(set(owned)) == len(owned) == pool.count(PageState.OWNED)
        leases = [r.lease for r in holders if r.lease is not None]
        assert len(leases) == self.bench.cache.num_leases
        if not self.config.radix_cache:
            assert all(pool.count(PageState.CACHED) == 0 for pool in self.bench.pools)

    def teardown(self) -> None:
        """Left alone, everything that was asked for ends: nothing waits for ever."""
        if not hasattr(self, "bench"):
            return
        while self.left:
            self.sent()
        while self.in_flight:
            self.commit(1, 1, 0.0, True)
        for _ in range(2000):
            if not self.live:
                break
            self.now += 0.5
            self.admit(0.0)
            for request in list(self.coming):
                self.land_one(request, 1)
            self.plan()
            while self.in_flight:
                for _ in range(self.config.num_ahead):
                    self.plan_behind()
                self.commit(1, 1, 0.0, True)
        assert not self.live, "a request is stuck"
        self.bench.check_empty()


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
