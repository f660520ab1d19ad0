"""What each step computes, and what becomes of its result: continuous batching, chunked prefill, growth, retraction.

Each step lets `num_computed` catch up with a request's tokens (vLLM v1's law); roles differ in what they make of it.

Some steps may be under way (`num_ahead` and one more): one that computes, and those planned behind it, so that the
device need not wait for the host. A step is planned behind one without guesses: where each of its rows goes on is
known, the token that it draws is not (`TokenOf`). It takes no memory from anybody who runs; where that would be
needed, where states move, and behind chunks of prompts whose windows move, it is planned when those before are
committed.

Rows that go on by one token in every step stand in a set of their own (decode_set.py). Planning and committing them
costs what has changed among them, and a short loop that books their tokens.

What a step may read or write is given back at the commit of the last step that names it: a request that ends while
steps name it keeps everything until then.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.flight import NO_GROUP, DecodeGroup, Flight, Following, following
from deltaserve.control.sched.holders import Holders
from deltaserve.control.sched.plan import (
    DecodePart,
    DecodeRows,
    ItemOutcome,
    ItemResult,
    PageUpdate,
    PlanItem,
    PlanItems,
    StepPlan,
    StepResult,
    WorkList,
)
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.running import Running
from deltaserve.control.sched.speculation import Speculation
from deltaserve.control.sched.step_progress import NONE_DECODED, Committed, Decoded, StepProgress
from deltaserve.control.sched.token_shares import TokenShares
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PoolId, StepIndex
from deltaserve.core.tokens import TOKEN_BYTES, token_len
from deltaserve.core.wire.messages import CacheUse


class Steps:
    """Plans the next steps of the running requests, and commits their results to them."""

    def __init__(self, cache: PrefixCache, budget: Budget, running: Running, holders: Holders) -> None:
        self._cache = cache
        self._budget = budget
        self._running = running
        self._holders = holders
        is_adaptive = running.config.draft_policy == "adaptive"
        self.speculation = Speculation(running.step_target.cost if is_adaptive else None)
        self._tokens = TokenShares(budget, running, self.speculation)
        self._step = 0
        self._flights: list[Flight] = []
        """The one that computes, then those planned behind it."""
        self._last: Mapping[Request, PlanItem] = {}
        """What the one planned last, under way or not, has planned one by one."""
        self._group = NO_GROUP
        """The requests that go on by one token in every step, as they were planned last."""
        self._stalled: set[Request] = set()

    @property
    def is_idle(self) -> bool:
        return not self._flights and not self._running.ending

    @property
    def ending(self) -> Iterable[Request]:
        """Requests that ended while steps name them: they keep their pages until the last one is committed."""
        return self._running.ending

    def is_in_flight(self, request: Request) -> bool:
        """Whether a step under way computes this request."""
        return any(flight.names(request) for flight in self._flights)

    def _following(self, request: Request) -> Following:
        """Where it goes on behind all steps under way."""
        return following(request, self._flights)

    def has_work(self) -> bool:
        """Whether plan() may be called, and may find something to compute."""
        if not self._running.requests or len(self._flights) > self._running.config.num_ahead:
            return False
        return not self._flights or self._may_plan_behind(self._flights[-1])

    def end(self, request: Request, leave: Callable[[Request], None]) -> None:
        """The request gives everything back, as `leave` does: now, or when the last step that names it is committed. No
        further step names it."""
        if self.is_in_flight(request):
            self._running.end_later(request, leave)
            return
        leave(request)

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step: every decode row, then extends in admission order up to the step's budget.

        Behind one that is under way: None when that has to be committed first.
        """
        behind = self._flights[-1] if self._flights else None
        if behind is not None and (
            len(self._flights) > self._running.config.num_ahead or not self._may_plan_behind(behind)
        ):
            raise StateError("plan() before the last plan was committed")
        self._settle_decoding()
        self._free_behind()
        if behind is None:
            self._grow_rows()
            others = [request for request in self._running.others if request not in self._stalled]
        else:
            others = [request for request in self._running.others if self._goes_on_behind(request)]
            if not (others or len(self._running.decoding)) or not self._grow_behind(others):
                return None
            self.speculation.go_without()
        items = self._tokens.items({request: self._following(request) for request in others}, StepIndex(self._step))
        may_be_empty = behind is None and self._running.rows.has_news
        return self._launch(items) if items or len(self._running.decoding) or may_be_empty else None

    def _settle_decoding(self) -> None:
        """Who drew a token in the step planned last goes on by one in every step from now on; who has drawn its last
        one does no more."""
        running, last = self._running, self._last
        if last and running.may_go_on:
            for request in [r for r, item in last.items() if r in running.others and self._joins(r, item)]:
                running.goes_on(request, request.num_tokens + self._following(request).num_draws - 1)
        for request in running.decoding.ended():
            running.falls_out(request)

    def _joins(self, request: Request, item: PlanItem) -> bool:
        """Whether it goes on behind what this item of it draws, or drew."""
        if not item.samples or request.sampling.logprobs is not None or not request.tabled:
            return False  # nothing tabled: it has another row by now, which is still to be opened
        if request.late_to_share or request.num_tokens - request.num_computed > 1:
            return False  # others wait for the end of its prompt
        if count := self._following(request).num_draws:
            return request not in self._running.ending and self._draws_behind(request, count)
        end = item.q_start + item.num_known
        return request.num_computed == end == request.num_tokens - 1

    def _launch(self, items: Sequence[PlanItem]) -> StepPlan:
        running = self._running
        going_on = running.decoding.tell()
        decode = None if going_on is None else DecodePart(going_on, running.decoding.clock, StepIndex(self._step))
        self._step += 1
        wanted = [item.wanted_drafts for item in items if item.wanted_drafts]
        decoding = tuple(item.row for item in items if item.is_decode)
        plan = StepPlan(
            step=StepIndex(self._step),
            items=tuple(items) if decode is None else PlanItems(decode, tuple(items)),
            work=WorkList(running.config.split_tokens, running.shared_runs(going_on, decoding)),
            opens=running.rows.take_opens(),
            pages=(*self._page_updates(), *self._move_states(items)),
            closes=running.rows.take_closes(),
            least_likely=self.speculation.least_likely(len(wanted), max(wanted, default=0)),
            decode=decode,
        )
        by_row = {item.row: item for item in items}
        others = {r: by_row[r.row] for r in running.others if r.row in by_row} if items else {}
        for request, item in others.items():
            request.num_planned = item.q_start + item.q_len
            if running.config.plans_behind_prompts and not item.is_decode:
                running.count_extended()
        self._last = others
        self._flights.append(Flight(plan, self._group_of(going_on), running.decoding.ending(), others))
        return plan

    def _group_of(self, rows: DecodeRows | None) -> DecodeGroup:
        if self._group.rows is not rows:
            requests = tuple(self._running.decoding)
            self._group = NO_GROUP if rows is None else DecodeGroup(rows, requests, frozenset(requests))
        return self._group

    # ------------------------------------------------------------ behind a step under way

    def _may_plan_behind(self, flight: Flight) -> bool:
        config, needs = self._running.config, self._running.needs
        if not flight.is_plain or needs.state_pools:
            return False
        if flight.extends and (needs.more_pools or not config.plans_behind_prompts):
            return False
        return not config.max_drafts or not self.speculation.pays(
            self._tokens.guesses(self._running), len(self._running)
        )

    def _goes_on_behind(self, request: Request) -> bool:
        """Whether it has something to compute whatever the steps draw, unless that is a token that ends it."""
        if request in self._running.ending or request.late_to_share:
            return False
        count = self._following(request).num_draws
        return not count or self._draws_behind(request, count)

    def _draws_behind(self, request: Request, count: int) -> bool:
        """Whether it draws a further token behind `count` that steps under way draw, unless one of them ends it."""
        return not self._running.config.ends_with_prompt and request.num_tokens + count < request.max_len

    def _grow_behind(self, others: Iterable[Request]) -> bool:
        """Pages for what each computes next. False when somebody would have to make way."""
        needs, lacking = self._running.needs, {}
        if lacks_page := self._running.decoding.lacking():
            taken = self._budget.allocate((len(lacks_page),))
            if taken is None:
                return False
            for request, page in zip(lacks_page, taken[0], strict=True):
                self._running.grow(request, ([page],))
        for request in others:
            count = self._following(request).num_draws
            lacking[request] = needs.of_places(request, count) if count else needs.of_next_chunk(request)
        for request, pages in lacking.items():
            if not any(pages):
                continue
            grown = self._budget.allocate(pages)
            if grown is None:
                return False
            self._running.grow(request, grown)
        return True

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
        rows: Iterable[Request] = self._running.others
        if not self._running.needs.more_pools:  # the first pool's pages are there for all tokens that were known
            rows = [r for r in rows if r.num_computed >= r.num_pages * page_size]
        rows = (*self._running.decoding.lacking(), *rows)
        lacking_rows = {r: needs for r in rows if any(needs := lacking(r))}
        if lacking_rows:
            self._budget.make_room(self._running.needs.total(lacking_rows.values()))
        for request, needs in lacking_rows.items():
            while request in self._running and request not in self._stalled:
                grown = self._budget.allocate(needs)
                if grown is None:
                    self._make_way(request, self._budget.short(needs, self._running.needs.total(())))
                    continue
                self._running.grow(request, grown)
                break

    def _make_way(self, request: Request, short: Sequence[PoolId]) -> None:
        """Memory is short for a running row: the youngest waiting request yields, or the youngest running one, first of
        those that are computed ahead: else one of them that is older would throw out who is asked for again and again.

        Of those that hold some of what is short. A lone extend waits instead: what it lacks is a window's page that is
        still being sent, or copied to a file. For its last token it waits, too, while there is such a page: it would be
        computed again, and short of the same page again.
        """
        holder = self._holders.youngest(short)
        if holder is not None:
            self._holders.reclaim(holder)
        elif len(self._running) == 1 and self._may_stall(request, short):
            self._stalled.add(request)
        else:
            self._running.retract(
                max(self._running, key=lambda r: (any(map(r.num_held, short)), r.is_ahead, r.arrival))
            )

    def _may_stall(self, request: Request, short: Sequence[PoolId]) -> bool:
        """Whether the only row may be left out of the step for want of memory that comes back by itself."""
        is_extend = request.num_tokens - request.num_computed > 1
        return is_extend or (request in self._running.others and self._budget.comes_back(short))

    def _move_states(self, items: Sequence[PlanItem]) -> Iterable[PageUpdate]:
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
        for request in self._running.take_moved():
            if request.row is None:
                continue
            for pool in pools:
                known, end = request.tabled.get(pool, 0), request.end_page(pool)
                if known < end:
                    for first, pages in request.spans(pool, known):
                        yield PageUpdate(request.row, pool, first, pages)
                    request.tabled[pool] = end

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> Committed:
        """Apply a step's result. Results of requests that ended meanwhile are dropped, their pages given back."""
        if not self._flights or result.step != self._flights[0].plan.step:
            expected = self._flights[0].plan.step if self._flights else None
            raise StateError(f"result of step {result.step} while step {expected} is expected")
        flight = self._flights.pop(0)
        plan = flight.plan
        if result.typical_s is not None:
            step_s = result.typical_s - result.draft_seconds
            self._running.step_target.learn(plan.num_decoded, plan.num_extended, step_s)
        if result.typical_s is not None and self._running.config.max_drafts:
            made = [token_len(item.drafts) for item in result.items]
            self.speculation.learn_draft(flight.plan.items, made, result.draft_seconds)
        self._running.decay_reserve()
        decoded = NONE_DECODED if result.decoded is None else self._apply_decoded(flight, result.decoded)
        planned = flight.planned(result) if result.items else {}
        others = []
        for item in result.items:
            request, of_request = planned[item.row]
            if request in self._running.ending:
                self._distrust(request, item.outcome)
            else:
                others.append(self._apply(request, of_request, item))
        for request in [r for r in self._running.ending if not self.is_in_flight(r)]:
            self._running.ending.pop(request)(request)
        return Committed(tuple(others), decoded)

    def _apply_decoded(self, flight: Flight, tokens: bytes) -> Decoded:
        requests = flight.group.requests
        if len(tokens) != len(requests) * TOKEN_BYTES:
            raise StateError(f"{token_len(tokens)} tokens for {len(requests)} rows of step {flight.plan.step}")
        if not self._running.ending.keys().isdisjoint(flight.group.members):
            places = [place for place, request in enumerate(requests) if request not in self._running.ending]
            requests = tuple(requests[place] for place in places)
            tokens = b"".join(tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES] for place in places)
        first = 0
        for request in requests:
            end = first + TOKEN_BYTES
            request.tokens += tokens[first:end]
            request.num_computed = request.num_in_state = request.num_finite = request.num_computed + 1
            first = end
        return Decoded(requests, tokens, flight.ending)

    def _apply(self, request: Request, planned: PlanItem, result: ItemResult) -> StepProgress:
        if result.outcome is not ItemOutcome.FAILED:
            num_right = max(0, len(result.drawn) - 1)
            request.num_computed = request.num_in_state = planned.q_start + planned.num_known + num_right
            if num_right < planned.num_drafts:
                self._running.step_back(request)
        self._distrust(request, result.outcome)
        if planned.samples and not result.drawn:
            self._running.falls_out(request)
        is_extend = not planned.is_decode
        if is_extend:
            self._running.count_extended()
        if result.drawn:
            self.speculation.count(request, planned, result.drawn)
            for sampled in result.drawn:
                request.append(sampled.token)
            request.num_finite = request.num_computed
        if is_extend and request.num_tokens - request.num_computed == 1:
            self._running.starts_to_decode()
        request.guesses.drafts = result.drafts
        told = result.outcome, result.prompt_logprobs, result.features
        return StepProgress(request, planned.q_start, is_extend, result.drawn, *told)

    def _distrust(self, request: Request, outcome: ItemOutcome) -> None:
        """What was written by a step that could not compute it is not handed on. Any page that no token was drawn from
        may be why its output is not finite: none of them is matched again."""
        if outcome is ItemOutcome.COMPUTED:
            return
        if outcome is ItemOutcome.NOT_FINITE and self._running.uses_tree(request):
            sound = request.num_finite // self._running.config.page_size
            self._cache.poison(request.namespace, request.tokens, request.keys, sound)
        request.cache = CacheUse.BYPASS
