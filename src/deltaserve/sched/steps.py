"""What each step computes, and what becomes of its result: continuous batching, chunked prefill, growth, retraction.

Each step lets `num_computed` catch up with a request's tokens (vLLM v1's law); roles differ in what they make of it.
One plan at a time: plan() is not called again before commit(). A request that ends while its step runs keeps its
pages until that step is committed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltaserve.base.errors import StateError
from deltaserve.base.ids import PoolId, RowId, StepIndex
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.base.tokens import TOKEN_BYTES
from deltaserve.cache.prefix_cache import PrefixCache
from deltaserve.request.request import Request
from deltaserve.sched.budget import Budget
from deltaserve.sched.holders import Holders
from deltaserve.sched.plan import (
    ItemOutcome,
    ItemResult,
    PageUpdate,
    PlanItem,
    Sampled,
    StepPlan,
    StepResult,
    TokenValues,
    WorkList,
)
from deltaserve.sched.running import Running
from deltaserve.wire.messages import CacheUse


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What one step did for one request."""

    request: Request
    computed_from: int
    sampled: Sampled | None
    outcome: ItemOutcome
    prompt_logprobs: tuple[TokenLogprobs, ...]


class Steps:
    """Plans the next step of the running requests, and commits its result to them."""

    def __init__(self, cache: PrefixCache, budget: Budget, running: Running, holders: Holders) -> None:
        self._cache = cache
        self._budget = budget
        self._running = running
        self._holders = holders
        self._step = 0
        self._in_flight: dict[RowId, tuple[Request, PlanItem]] | None = None
        self._ended_in_flight: dict[Request, None] = {}
        self._stalled: set[Request] = set()

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self._ended_in_flight

    @property
    def ending(self) -> Iterable[Request]:
        """Requests that ended while their step runs: they keep their pages until it is committed."""
        return self._ended_in_flight

    def is_in_flight(self, request: Request) -> bool:
        """Whether the step under way computes this request."""
        return self._in_flight is not None and request.row is not None and request.row in self._in_flight

    def has_work(self) -> bool:
        """Whether plan() may be called, and would compute something."""
        return bool(self._running.requests) and self._in_flight is None

    def end(self, request: Request) -> None:
        """The request gives everything back: now, or when the step that computes it is committed."""
        if self.is_in_flight(request):
            self._ended_in_flight[request] = None
            return
        self._running.give_back(request)

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step: every decode row, then extends in admission order up to the step's budget."""
        if self._in_flight is not None:
            raise StateError("plan() before the last plan was committed")
        self._free_behind()
        self._grow_rows()
        items, rows = self._items(), self._running.rows
        if not items and not rows.has_news:
            return None
        self._step += 1
        plan = StepPlan(
            step=StepIndex(self._step),
            items=tuple(items),
            work=WorkList(self._running.config.split_tokens, self._running.shared_runs(items)),
            opens=rows.take_opens(),
            pages=(*self._page_updates(), *self._move_states(items)),
            closes=rows.take_closes(),
        )
        by_row = {item.row: item for item in items}
        self._in_flight = {r.row: (r, by_row[r.row]) for r in self._running if r.row in by_row}
        for request, item in self._in_flight.values():
            request.num_planned = item.q_start + item.q_len
        return plan

    def _free_behind(self) -> None:
        """Give up the pages that no token to come can see, and the states that are gone on from."""
        more_pools, page_size = self._running.needs.more_pools, self._running.config.page_size
        if not more_pools:
            return
        for request in self._running:
            for pool in more_pools:
                first = self._cache.retentions[pool].first_needed(request.num_computed, page_size)
                self._budget.free_pages(pool, request.give_up(pool, first))
            if request.lease is not None:
                self._cache.shrink(request.lease, request.num_computed)

    def _grow_rows(self) -> None:
        """Pages for what each row computes next: one now and then when it decodes; of other pools also in an extend."""
        self._stalled.clear()
        lacking, page_size = self._running.needs.of_next_chunk, self._running.config.page_size
        rows: Iterable[Request] = self._running
        if not self._running.needs.more_pools:  # the first pool's pages are there for all tokens that were known
            rows = [r for r in rows if r.num_computed >= r.num_pages * page_size]
        hungry = {r: needs for r in rows if any(needs := lacking(r))}
        if hungry:
            self._budget.make_room(self._running.needs.total(hungry.values()))
        for request, needs in hungry.items():
            while request in self._running and request not in self._stalled:
                grown = self._budget.allocate(needs)
                if grown is None:
                    self._make_way(request, self._budget.short(needs, self._running.needs.total(())))
                    continue
                for owned, pages in zip(request.owned, grown, strict=True):
                    owned.extend(pages)
                break

    def _make_way(self, request: Request, short: Sequence[PoolId]) -> None:
        """Memory is short for a running row: the youngest waiting request yields, or the youngest running one.

        Of those that hold some of what is short. A lone extend waits instead: what it lacks is a window's page that is
        still being sent.
        """
        holder = self._holders.youngest(short)
        if holder is not None:
            self._holders.reclaim(holder)
        elif len(self._running) == 1 and request.num_tokens - request.num_computed > 1:
            self._stalled.add(request)
        else:
            self._running.retract(max(self._running, key=lambda r: (any(map(r.num_held, short)), r.arrival)))

    def _move_states(self, items: list[PlanItem]) -> Iterable[PageUpdate]:
        """An item's own slot takes the state at its end. One that it goes on from is the tree's by now, or is lost.

        After the other updates: the slot of a state that nobody keeps is read and written under two page indexes.
        """
        state_pools = self._running.needs.state_pools
        if not state_pools:
            return ()
        requests = {request.row: request for request in self._running}
        for item in items:
            for pool in state_pools:
                last = (item.q_start + item.q_len - 1) // self._running.config.page_size
                requests[item.row].move_state(pool, last)
        return self._page_updates()

    def _page_updates(self) -> Iterable[PageUpdate]:
        pools = self._running.needs.pools
        for request in self._running:
            if request.row is None:
                continue
            for pool in pools:
                known, end = request.tabled.get(pool, 0), request.end_page(pool)
                if known < end:
                    for first, pages in request.spans(pool, known):
                        yield PageUpdate(request.row, pool, first, pages)
                    request.tabled[pool] = end

    # ------------------------------------------------------------ tokens of a step

    def _items(self) -> list[PlanItem]:
        decoding: list[Request] = []
        extending: list[Request] = []
        for request in self._running:
            if request in self._stalled:
                continue
            (decoding if request.num_tokens - request.num_computed == 1 else extending).append(request)
        config = self._running.config
        budget = config.step_len
        if decoding and config.extend_len_beside_decode is not None:
            budget = min(budget, config.extend_len_beside_decode)
        items = [_item(request, 1) for request in decoding]
        return items + [_item(request, q_len) for request, q_len in self._shares(extending, budget)]

    def _shares(self, extending: list[Request], budget: int) -> list[tuple[Request, int]]:
        """Tokens of each extend in this step.

        The oldest goes first if the step can end it. Otherwise it gets half, the others the other half, the shortest
        of them first, and what one half leaves over goes to the other. So a long prompt goes on at no less than half
        the pace, and a short one behind it waits for about one step.
        """
        if not extending:
            return []
        oldest, *others = extending
        config = self._running.config
        is_long = oldest.num_tokens - oldest.num_computed > min(budget, config.chunk_len)
        kept = max(config.page_size, budget // 2) if others and is_long else budget
        left = budget - self._chunk(oldest, kept)
        shares = []
        for request in sorted(others, key=lambda r: r.num_tokens - r.num_computed):
            q_len = self._chunk(request, left)
            if q_len:
                shares.append((request, q_len))
                left -= q_len
        q_len = self._chunk(oldest, left + self._chunk(oldest, kept))
        return [(oldest, q_len), *shares] if q_len else shares

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of the next chunk: to the end of the prompt, or up to an absolute page multiple.

        A state that is to be kept ends a chunk, and with states the cuts are on their grid, if that is not too far.
        """
        config, computed = self._running.config, request.num_computed
        allowed = min(config.chunk_len, budget)
        stop = self._running.next_stop(request)
        if stop is not None and stop - computed <= allowed:
            return stop - computed
        if request.num_tokens - computed <= allowed:
            return request.num_tokens - computed
        end = (computed + allowed) // config.page_size * config.page_size
        on_grid = end // config.grid_len * config.grid_len
        if self._running.needs.state_pools and on_grid > computed:
            end = on_grid
        return max(0, end - computed)

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> list[StepProgress]:
        """Apply a step's result. Results of requests that ended meanwhile are dropped, their pages given back."""
        if self._in_flight is None or result.step != self._step:
            raise StateError(f"result of step {result.step} while step {self._step} is expected")
        rows, self._in_flight = self._in_flight, None
        self._running.decay_reserve()
        progress = [self._apply(*rows[item.row], item) for item in result.items if item.row in rows]
        ended, self._ended_in_flight = self._ended_in_flight, {}
        for request in ended:
            self._running.give_back(request)
        return [p for p in progress if p.request not in ended]

    def _apply(self, request: Request, planned: PlanItem, result: ItemResult) -> StepProgress:
        if result.outcome is not ItemOutcome.FAILED:
            request.num_computed = planned.q_start + planned.q_len
        if result.outcome is not ItemOutcome.COMPUTED:
            self._distrust(request, result.outcome)
        if planned.q_len > 1:
            self._running.num_extended += 1
        if result.sampled is not None:
            request.append(result.sampled.token)
            request.num_finite = request.num_computed
            if planned.q_len > 1:
                self._running.starts_to_decode()
        return StepProgress(request, planned.q_start, result.sampled, result.outcome, result.prompt_logprobs)

    def _distrust(self, request: Request, outcome: ItemOutcome) -> None:
        """What the step wrote is not handed on. Any page that no token was drawn from may be why its output is not
        finite: none of them is matched again."""
        if outcome is ItemOutcome.NOT_FINITE and self._running.uses_tree(request):
            sound = request.num_finite // self._running.config.page_size
            self._cache.poison(request.namespace, request.tokens, request.keys, sound)
        request.cache = CacheUse.BYPASS


def _item(request: Request, q_len: int) -> PlanItem:
    start, end = request.num_computed, request.num_computed + q_len
    if request.row is None:
        raise StateError("a running request without a row")
    return PlanItem(
        row=request.row,
        q_start=start,
        q_len=q_len,
        inputs=TokenValues(bytes(request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])),
        samples=end == request.num_tokens,
        wants_prompt_logprobs=request.sampling.prompt_logprobs is not None and start < request.prompt_len - 1,
    )
