"""The scheduler under random traffic, against a small model that only knows tokens and page tables.

The model replays every plan into its own tables and compares them with the scheduler's requests; checks chunks,
budgets, rows, shared runs (by brute force over tables) and what a step may touch; and ends with everything given back.
Prompts are built of few letters, so that requests share prefixes and twins meet. Some are computed elsewhere: then what
of each pool is missing is granted, all or nothing, and lands whole.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltaserve.base.errors import StateError
from deltaserve.base.ids import Namespace, PageId, PoolId, RowId
from deltaserve.base.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.cache.pages import PageState
from deltaserve.request.request import Origin, Request
from deltaserve.sched.needs import Needs
from deltaserve.sched.plan import ItemResult, Sampled, StepPlan, StepResult, TokenValues
from deltaserve.sched.queue import TryOutcome
from deltaserve.sched.sched_config import SchedConfig
from deltaserve.wire.messages import CacheUse
from tests.sched.sharing import check_runs, possible_positions, shared_positions
from tests.sched.toys import Bench, held_pages, make_request, page_lists

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
    )


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
        self.scheduler.waiting.fetch = self.fetch
        self.now = 0.0
        self.live: list[Request] = []
        self.left: list[Request] = []
        self.coming: dict[Request, tuple[list[range], tuple[list[PageId], ...]]] = {}
        """Granted: per pool, which page indexes are on their way, and into which pages."""
        self.landed: list[Request] = []
        self.in_flight: StepPlan | None = None
        self.ended_in_flight: dict[RowId, Request] = {}

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
        """At most as long as the smallest pool, as the door sees to."""
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
        admitted = self.scheduler.waiting.admit(self.now)
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

    def fetch(self, request: Request, reserve: Needs, now: float) -> TryOutcome:
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
            needed = range(kept.first_needed(request.num_tokens, size), -(-request.num_tokens // size))
            held = range(request.lease.first_page(pool), request.lease.num_pages)
            missing.append(range(held.stop, needed.stop) if held else needed)
            assert set(needed) <= {*held, *missing[-1]}
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

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        before = {r: r.num_computed for r in self.scheduler.running}
        plan = self.scheduler.steps.plan()
        self.resume()
        if plan is None:
            assert not len(self.scheduler.running)
            return
        self.bench.tables.apply(plan)
        self.in_flight, self.ended_in_flight = plan, {}
        self.check_items(plan, before)
        self.check_tables(plan)

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
            assert item.samples == (item.q_len == missing)
            assert isinstance(item.inputs, TokenValues)
            first, end = item.q_start * 4, (item.q_start + item.q_len) * 4
            assert item.inputs.tokens == bytes(request.tokens[first:end])
            if missing > 1:
                num_extended += item.q_len
                assert item.q_len <= self.config.chunk_len
                assert item.samples or (item.q_start + item.q_len) % self.config.page_size == 0
        assert num_extended <= self.config.step_len
        decoding = {r.row for r in self.scheduler.running if r.num_tokens - r.num_computed == 1}
        assert decoding <= {item.row for item in plan.items}, "a decode row is left out"

    def check_tables(self, plan: StepPlan) -> None:
        """The executor's tables are the scheduler's, for every row; runs are true; positions have a page."""
        tables = self.bench.tables
        running = {r.row: r for r in self.scheduler.running if r.row is not None}
        assert tables.rows.keys() == running.keys()
        lines = {row: page_lists(self.bench, request) for row, request in running.items()}
        for row, request in running.items():
            for mine, theirs in zip(tables.rows[row], lines[row], strict=True):
                assert all(page is None or mine[index] == page for index, page in enumerate(theirs))
            assert tables.tokens[row] == request.tokens[: len(tables.tokens[row])]
        q_starts = {item.row: item.q_start for item in plan.items}
        for item in plan.items:
            self.check_pages(running[item.row], item.q_start, item.q_start + item.q_len)
        lines = {row: line[:1] for row, line in lines.items()}
        shared = {row: lines[row] for row in q_starts}
        split = self.config.split_tokens
        check_runs(plan.work.shared, shared, q_starts, self.config.page_size, split)
        decoding = {i.row: running[i.row] for i in plan.items if i.samples and i.q_len == 1}
        leased = {row: r.lease.num_tokens if r.lease else 0 for row, r in decoding.items()}
        possible = possible_positions({row: lines[row] for row in decoding}, leased, self.config.page_size, split)
        assert shared_positions(plan.work.shared) == possible, "rows share less, or more, than their leases"

    def check_pages(self, request: Request, start: int, end: int) -> None:
        """What the positions [start, end) see and write is there, and not much more. The tables look into states."""
        size = self.config.page_size
        for index, kept in enumerate(self.bench.cache.retentions):
            held = held_pages(request, PoolId(index))
            first = (end - 1) // size if kept.lifetime is Lifetime.STATE else kept.first_needed(start, size)
            assert held.keys() >= set(range(first, -(-end // size)))
            assert len(held) == request.num_held(PoolId(index))
            assert len(held) <= kept.most_pages(request.num_tokens, self.config.chunk_len, size)

    @precondition(lambda self: self.in_flight is not None)
    @rule(token=st.integers(0, 2))
    def commit(self, token: int) -> None:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        results = tuple(ItemResult(i.row, Sampled(token) if i.samples else None) for i in plan.items)
        progress = self.scheduler.steps.commit(StepResult(plan.step, results))
        ended = set(self.ended_in_flight.values())
        assert not ended & {p.request for p in progress}
        for request in ended:
            assert (request.row, request.lease, request.owned) == (None, None, ())
        planned = {item.row: item for item in plan.items}
        for item in progress:
            request = item.request
            assert request.row is not None
            done = planned[request.row]
            assert (item.computed_from, request.num_computed) == (done.q_start, done.q_start + done.q_len)
            self.scheduler.running.share_step(request, item.computed_from)
            if request.output_len >= request.sampling.max_tokens:
                self.scheduler.finish(request)
                self.live.remove(request)

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
        if under_way and request.row is not None:
            self.ended_in_flight[request.row] = request
        owned = [len(pages) for pages in request.owned]
        (self.scheduler.finish if keeps else self.scheduler.discard)(request)
        if under_way:
            assert [len(pages) for pages in request.owned] == owned, "pages of a running step were given away"
        else:
            assert (request.row, request.lease, request.owned) == (None, None, ())

    @precondition(lambda self: self.in_flight is None and self.computed())
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

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def no_second_plan(self) -> None:
        try:
            self.scheduler.steps.plan()
        except StateError:
            return
        raise AssertionError("a plan before the commit of the last one")

    # ------------------------------------------------------------ what always holds

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.running.check_integrity()
        self.bench.cache.check_integrity()
        holders = [*self.live, *self.left, *self.ended_in_flight.values()]
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
        if self.in_flight is not None:
            self.commit(1)
        for _ in range(2000):
            if not self.live:
                break
            self.now += 0.5
            self.admit(0.0)
            for request in list(self.coming):
                self.land_one(request, 1)
            self.plan()
            if self.in_flight is not None:
                self.commit(1)
        assert not self.live, "a request is stuck"
        self.bench.check_empty()


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
