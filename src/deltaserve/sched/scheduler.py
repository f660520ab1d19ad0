"""The scheduler of every role: continuous batching, chunked prefill, budgets over every pool, retraction.

Each step lets `num_computed` catch up with a request's tokens (vLLM v1's law); roles differ in what they make of it.

    add -> [waiting] -> admit -> [running] -> plan / commit ... -> finish | discard
                                    |-> leave (prefill: computed, keeps its pages until they are sent)
                                    |-> retract (memory ran out: commit to the tree, give everything back)

A request that ends while its step runs keeps its pages until that step is committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from deltaserve.base.errors import IntegrityError, StateError
from deltaserve.base.ids import Namespace, PoolId, RowId, StepIndex
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.base.tokens import TOKEN_BYTES
from deltaserve.cache.prefix_cache import PrefixCache
from deltaserve.request.request import Request
from deltaserve.sched.budget import Budget
from deltaserve.sched.plan import (
    ItemOutcome,
    ItemResult,
    PageUpdate,
    PlanItem,
    Sampled,
    SharedRun,
    StepPlan,
    StepResult,
    TokenValues,
    WorkList,
)
from deltaserve.sched.policy import MAX_TRIES, POLICIES, AdmissionQueue
from deltaserve.sched.rows import Rows
from deltaserve.sched.twins import Twins
from deltaserve.sched.worklist import LeasedRow, shared_runs
from deltaserve.wire.messages import CacheUse


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Lengths in tokens."""

    page_size: int
    max_running: int
    chunk_len: int
    """At most so many tokens of one request per step; a multiple of page_size."""
    step_len: int
    """At most so many extend tokens per step, over all requests."""
    split_tokens: int
    reserve_len: int
    """Decode tokens to keep room for, per running request, when another one is admitted."""
    radix_cache: bool = True
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one request."""

    request: Request
    computed_from: int
    sampled: Sampled | None
    outcome: ItemOutcome
    prompt_logprobs: tuple[TokenLogprobs, ...]


class _Admission(Enum):
    ADMITTED = "admitted"
    NO_ROOM = "no room"
    HELD_BACK = "held back"
    """A running twin is computing the very next page: taken from the tree when it is there."""


Gate = Callable[[Request, int], bool]
"""(request, pages it needs) |-> may it be admitted now? Asked last, when everything else says yes."""


class Scheduler:
    """Owns rows and the requests in them. One plan at a time: plan() is not called again before commit()."""

    def __init__(
        self, config: SchedConfig, cache: PrefixCache, budget: Budget, seed_of: Callable[[Namespace], bytes]
    ) -> None:
        self.config = config
        self._cache = cache
        self._budget = budget
        self._seed_of = seed_of
        self.waiting = AdmissionQueue(POLICIES[config.policy](cache))
        self._running: dict[Request, None] = {}
        self._rows = Rows(config.max_running)
        self._twins = Twins(config.page_size, self._feeds_tree)
        self._in_flight: dict[RowId, tuple[Request, PlanItem]] | None = None
        self._ended_in_flight: dict[Request, None] = {}
        self._retracted: list[Request] = []
        self.is_blocked = False  # who may be overtaken no more waits for memory: only who holds its own passes
        self._step = 0
        self._runs: tuple[SharedRun, ...] | None = None

    # ------------------------------------------------------------ what is going on

    @property
    def running(self) -> Iterable[Request]:
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def ending(self) -> Iterable[Request]:
        """Requests that ended while their step runs: they keep their pages until it is committed."""
        return self._ended_in_flight

    def take_retracted(self) -> list[Request]:
        """Requests that gave their memory back since the last call; the owner decides how they resume."""
        taken, self._retracted = self._retracted, []
        return taken

    # ------------------------------------------------------------ admission

    def add(self, request: Request) -> None:
        """Queue a request. One that holds its pages already (landed from prefill) only waits for a row."""
        self.waiting.push(request)

    def add_first(self, request: Request) -> None:
        """Queue a retracted request before all others."""
        self.waiting.push_first(request)

    def admit(self, now: float, gate: Gate | None = None) -> list[Request]:
        """Give rows and pages to waiting requests, in order with bounded overtaking."""
        admitted: list[Request] = []
        self.is_blocked = False
        frontier = self._twins.frontier(self._running)
        num_refused = 0
        for request in self.waiting.in_order():
            if not self._rows.num_free:
                break
            if self._twins.holds_back(request) or (self.is_blocked and request.lease is None):
                continue
            match self._admit_one(request, frontier, gate):
                case _Admission.ADMITTED:
                    self.waiting.remove(request)
                    admitted.append(request)
                    frontier |= self._twins.frontier((request,))
                case _Admission.NO_ROOM:
                    num_refused += 1
                    self.is_blocked |= num_refused == MAX_TRIES or not self.waiting.may_overtake(request, now)
        return admitted

    def _admit_one(self, request: Request, frontier: dict[bytes, Request], gate: Gate | None) -> _Admission:
        if request.lease is not None:  # landed from prefill: holds its pages
            self._take_row(request)
            return _Admission.ADMITTED
        matches = self._uses_tree(request) and request.sampling.prompt_logprobs is None
        limit = request.num_tokens - 1 if matches else 0
        match = self._cache.match(request.namespace, bytes(request.tokens), bytes(request.keys), limit)
        twin = frontier.get(self._twins.key_after(request, match.num_tokens)) if matches else None
        if twin is not None:
            self._twins.hold_back(request, twin)
            return _Admission.HELD_BACK
        lease = self._cache.lease(match)
        need = -(-request.num_tokens // self.config.page_size) - lease.num_pages
        fits = self._budget.fits(need, self.reserve_pages()) and (gate is None or gate(request, need))
        owned = self._budget.allocate(need) if fits else None
        if owned is None:
            self._cache.release(lease)
            return _Admission.NO_ROOM
        request.lease, request.owned, request.num_computed = lease, owned, lease.num_tokens
        self._take_row(request)
        return _Admission.ADMITTED

    def reserve_pages(self, num_entering: int = 0) -> int:
        """Pages to leave for the decode steps of those running or entering, per pool; 0 for a lone request."""
        per_request = -(-self.config.reserve_len // self.config.page_size)
        others = len(self._running) + num_entering
        return per_request * (others + 1) if others else 0

    def _uses_tree(self, request: Request) -> bool:
        return self.config.radix_cache and request.cache is CacheUse.NORMAL

    def _feeds_tree(self, request: Request) -> bool:
        """Whether it runs, and will hand further pages of its prompt to the tree."""
        return request in self._running and request.num_tokens - request.num_computed > 1 and self._uses_tree(request)

    def _take_row(self, request: Request) -> None:
        self._rows.take(request)
        self._running[request] = None
        self._runs = None

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step: every decode row, then extends in admission order up to the step's budget."""
        if self._in_flight is not None:
            raise StateError("plan() before the last plan was committed")
        self._grow_decode_rows()
        items = self._items()
        if not items and not self._rows.has_news:
            return None
        self._step += 1
        plan = StepPlan(
            step=StepIndex(self._step),
            items=tuple(items),
            work=WorkList(self.config.split_tokens, self._shared(items)),
            opens=self._rows.take_opens(),
            pages=tuple(self._page_updates()),
            closes=self._rows.take_closes(),
        )
        by_row = {item.row: item for item in items}
        self._in_flight = {r.row: (r, by_row[r.row]) for r in self._running if r.row in by_row}
        return plan

    def is_in_flight(self, request: Request) -> bool:
        """Whether the step under way computes this request."""
        return self._in_flight is not None and request.row is not None and request.row in self._in_flight

    def has_work(self) -> bool:
        """Whether plan() may be called, and would compute something."""
        return bool(self._running) and self._in_flight is None

    def _grow_decode_rows(self) -> None:
        """One page for each decode row whose next token starts a page; evict once, then retract the youngest."""
        page_size = self.config.page_size
        hungry = [r for r in self._running if r.num_computed >= r.num_pages * page_size]
        if hungry:
            self._budget.make_room(len(hungry))
        for request in hungry:
            while request in self._running:
                grown = self._budget.allocate(1)
                if grown is not None:
                    request.pages_dirty_from = min(request.pages_dirty_from, request.num_pages)
                    for owned, pages in zip(request.owned, grown, strict=True):
                        owned.extend(pages)
                    break
                self.retract(max(self._running, key=lambda r: r.arrival))

    def _items(self) -> list[PlanItem]:
        items: list[PlanItem] = []
        extends: list[Request] = []
        for request in self._running:
            if request.num_tokens - request.num_computed == 1:
                items.append(self._item(request, 1))
            else:
                extends.append(request)
        budget = self.config.step_len
        for request in extends:
            q_len = self._chunk(request, budget)
            if q_len == 0:
                break
            items.append(self._item(request, q_len))
            budget -= q_len
        return items

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of the next chunk: to the end of the prompt, or up to an absolute page multiple."""
        missing = request.num_tokens - request.num_computed
        allowed = min(self.config.chunk_len, budget)
        if missing <= allowed:
            return missing
        end = (request.num_computed + allowed) // self.config.page_size * self.config.page_size
        return max(0, end - request.num_computed)

    def _item(self, request: Request, q_len: int) -> PlanItem:
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

    def _shared(self, items: list[PlanItem]) -> tuple[SharedRun, ...]:
        """Who shares is settled when a row opens, closes or hands pages to the tree; not every step."""
        if self._runs is None:
            decoding = {item.row for item in items if item.q_len == 1 and item.samples}
            rows = [
                LeasedRow(r.row, r.lease.path())
                for r in self._running
                if r.row is not None and r.row in decoding and r.lease is not None
            ]
            self._runs = shared_runs(rows, self.config.split_tokens)
        return self._runs

    def _page_updates(self) -> Iterable[PageUpdate]:
        for request in self._running:
            first, end = request.pages_dirty_from, request.num_pages
            if first < end and request.row is not None:
                for pool in range(self._budget.num_pools):
                    pages = request.pages(PoolId(pool), first, end)
                    yield PageUpdate(request.row, PoolId(pool), first, pages)
                request.pages_dirty_from = end

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> list[Progress]:
        """Apply a step's result. Results of requests that ended meanwhile are dropped, their pages given back."""
        if self._in_flight is None or result.step != self._step:
            raise StateError(f"result of step {result.step} while step {self._step} is expected")
        rows, self._in_flight = self._in_flight, None
        progress = [self._apply(*rows[item.row], item) for item in result.items if item.row in rows]
        ended, self._ended_in_flight = self._ended_in_flight, {}
        for request in ended:
            self._give_back(request)
        return [p for p in progress if p.request not in ended]

    def _apply(self, request: Request, planned: PlanItem, result: ItemResult) -> Progress:
        if result.outcome is not ItemOutcome.FAILED:
            request.num_computed = planned.q_start + planned.q_len
        if result.sampled is not None:
            request.append(result.sampled.token)
            if planned.q_len > 1:
                self._runs = None  # it decodes from now on and may share
        return Progress(request, planned.q_start, result.sampled, result.outcome, result.prompt_logprobs)

    # ------------------------------------------------------------ the end of a request

    def share_computed(self, request: Request) -> None:
        """Hand the request's full computed pages to the tree; where a twin was first, adopt its pages."""
        lease = request.lease
        if lease is None or not self._uses_tree(request):
            return
        page_size, first = self.config.page_size, lease.num_pages
        full = request.num_computed // page_size
        if full <= first:
            return
        request.grow_keys(self._seed_of(request.namespace), page_size, full)
        insertion = self._cache.insert(
            lease,
            request.namespace,
            bytes(request.tokens[: full * page_size * TOKEN_BYTES]),
            bytes(request.keys[: full * 16]),
            tuple(tuple(pages[: full - first]) for pages in request.owned),
        )
        request.lease = insertion.lease
        for pages in request.owned:
            del pages[: full - first]
        if insertion.num_adopted_pages:
            request.pages_dirty_from = min(request.pages_dirty_from, first)
        self._runs = None

    def leave(self, request: Request) -> None:
        """Give up the row, keep the pages (a computed prompt whose pages are still to be sent)."""
        self._running.pop(request)
        self._drop_row(request)

    def finish(self, request: Request) -> None:
        """The end: what was computed stays in the tree, everything else is given back."""
        if not self.is_in_flight(request):
            self.share_computed(request)
        self.discard(request)

    def discard(self, request: Request) -> None:
        """The end, leaving nothing in the tree."""
        self.waiting.discard(request)
        self._twins.forget(request)
        if self.is_in_flight(request):
            self._ended_in_flight[request] = None
            return
        self._give_back(request)

    def retract(self, request: Request) -> None:
        """Take everything from a running request; what it computed stays in the tree for its return."""
        self.share_computed(request)
        self._give_back(request)
        request.num_computed = 0
        request.num_retractions += 1
        self._retracted.append(request)

    def _give_back(self, request: Request) -> None:
        self._running.pop(request, None)
        self._drop_row(request)
        self._budget.free(request.owned)
        request.owned = ()
        if request.lease is not None:
            self._cache.release(request.lease)
            request.lease = None

    def _drop_row(self, request: Request) -> None:
        self._rows.give_back(request)
        self._runs = None

    # ------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Rows are held once; every running request holds pages for what it computed."""
        rows = [r.row for r in self._running]
        if len(set(rows)) != len(rows) or len(rows) + self._rows.num_free != self._rows.num_rows:
            raise IntegrityError(f"rows: {len(rows)} held, {self._rows.num_free} free of {self._rows.num_rows}")
        for request in self._running:
            if request.num_computed > request.num_pages * self.config.page_size:
                raise IntegrityError(f"{request.num_computed} tokens computed in {request.num_pages} pages")
            if not 0 <= request.num_computed <= request.num_tokens:
                raise IntegrityError(f"{request.num_computed} tokens computed of {request.num_tokens}")
