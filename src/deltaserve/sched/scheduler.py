"""The scheduler of every role: continuous batching, chunked prefill, budgets over every pool, retraction.

Each step lets `num_computed` catch up with a request's tokens (vLLM v1's law); roles differ in what they make of it.

    add -> [waiting] -> admit -> [running] -> plan / commit ... -> finish | discard
            add_landed -> |          |-> leave (computed for somebody else: keeps its pages until they are sent)
                                     |-> retract (memory ran out: commit to the tree, give everything back)

A request that ends while its step runs keeps its pages until that step is committed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

from deltaserve.base.errors import IntegrityError, StateError
from deltaserve.base.ids import Namespace, PoolId, RowId, StepIndex
from deltaserve.base.lifetime import Lifetime
from deltaserve.base.sampling import TokenLogprobs
from deltaserve.base.tokens import TOKEN_BYTES
from deltaserve.cache.prefix_cache import Match, PrefixCache
from deltaserve.request.request import Origin, Request
from deltaserve.sched.budget import Budget
from deltaserve.sched.holders import Holders
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
from deltaserve.sched.policy import POLICIES
from deltaserve.sched.queue import FairQueue, TryOutcome
from deltaserve.sched.rows import Rows
from deltaserve.sched.twins import Twins
from deltaserve.sched.worklist import LeasedRow, shared_runs
from deltaserve.wire.messages import CacheUse

HORIZON_STEPS = 2
"""Steps' worth of tokens that are admitted ahead of being computed."""
_LOOK_AGAIN_S = 0.1
"""Waiting requests are tried again after so long although nothing changed: links come back, waits for twins end."""
_MAX_RESERVE_SCALE = 16.0
_RESERVE_DECAY = 0.98

Needs = tuple[int, ...]
"""Pages of each pool: had all, or none."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last try of all waiting requests depended on."""

    num_pushed: int
    """Requests queued so far: a new one is to be tried, and lets in nobody else."""
    others: tuple[int, ...]
    """Who left, version of the cache, rows, steps, time: each may let in somebody who was not let in."""
    available: tuple[int, ...]
    """Pages per pool: only more of them may."""

    def forestalls(self, later: "_Seen") -> bool:
        """Whether trying again can come to nothing else."""
        return self.num_pushed == later.num_pushed and self.settles(later)

    def settles(self, later: "_Seen") -> bool:
        """Whether trying those again who were there can come to nothing else."""
        is_no_more = all(now <= then for now, then in zip(later.available, self.available, strict=True))
        return self.others == later.others and is_no_more


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
    """Decode tokens to keep room for, per running request, when another one is admitted; more after a retraction."""
    extend_len_beside_decode: int | None = None
    """At most so many extend tokens in a step that has decode rows, so that those keep their pace; None: step_len."""
    radix_cache: bool = True
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What one step did for one request."""

    request: Request
    computed_from: int
    sampled: Sampled | None
    outcome: ItemOutcome
    prompt_logprobs: tuple[TokenLogprobs, ...]


class Claim(Enum):
    """What a request may take when its turn comes."""

    NOTHING = "nothing"
    """Not now: it waits for somebody else."""
    SPARE = "spare"
    """Memory nobody holds: it is computed ahead of being asked for."""
    FULL = "full"
    """Also what requests behind it hold while they wait."""


class Gatekeeper(Protocol):
    """Who may be computed, beyond what rows, steps and memory allow: the owner's say."""

    def may_start(self, request: Request) -> bool:
        """Asked often and first; looks nothing up."""
        ...

    def claim(self, request: Request, cached_len: int) -> Claim:
        """The request's turn has come, with `cached_len` tokens in the cache."""
        ...


class OpenDoor:
    """Everybody may."""

    def may_start(self, request: Request) -> bool:
        return True

    def claim(self, request: Request, cached_len: int) -> Claim:
        return Claim.FULL


@dataclass(slots=True)
class _Booking:
    """What is promised so far, while one call of `admit` runs."""

    horizon_left: int
    """Tokens that may still be booked for the next steps."""
    has_long: bool
    """Whether somebody computes who needs more than a whole step."""
    reserve: Needs
    """Pages kept for what those running or entering have not taken yet, per pool."""
    num_rows: int
    """Rows nobody is promised."""
    frontier: dict[bytes, Request]
    """Key of the page that a running request is computing |-> the request."""

    @property
    def is_full(self) -> bool:
        return self.num_rows <= 0

    @property
    def is_late(self) -> bool:
        """Whether what is admitted keeps the next steps busy."""
        return self.horizon_left <= 0


class Scheduler:
    """Owns rows and the requests in them. One plan at a time: plan() is not called again before commit().

    A prompt is admitted when the steps before it are nearly through: while less than two steps' worth of tokens is
    admitted and not computed. So memory is taken shortly before it is used, and one that is admitted starts soon. Of
    prompts longer than a step one at a time is admitted; shorter ones go beside it.
    """

    def __init__(
        self,
        config: SchedConfig,
        cache: PrefixCache,
        budget: Budget,
        seed_of: Callable[[Namespace], bytes],
        gatekeeper: Gatekeeper | None = None,
    ) -> None:
        self.config = config
        self.gatekeeper: Gatekeeper = gatekeeper or OpenDoor()
        self.fetch: Callable[[Request, Needs, float], TryOutcome] | None = None
        """(request of origin FETCHED, pages to leave, now): try to have its pages sent here. Set by whoever can."""
        self._cache = cache
        self._budget = budget
        self._seed_of = seed_of
        self.waiting = FairQueue(POLICIES[config.policy](cache))
        self._landed: dict[Request, None] = {}
        self._entering: dict[Request, None] = {}
        self._holders = Holders(self.waiting.__contains__)
        self._running: dict[Request, None] = {}
        self._rows = Rows(config.max_running)
        self._twins = Twins(config.page_size, self._feeds_tree)
        self._in_flight: dict[RowId, tuple[Request, PlanItem]] | None = None
        self._ended_in_flight: dict[Request, None] = {}
        self._retracted: list[Request] = []
        self._yielded: list[Request] = []
        self._reserve_scale = 1.0
        self.num_retractions = 0
        self.num_blocked = 0
        """How often a waiting request was refused memory."""
        self._blocked_need = 0
        self._seen: _Seen | None = None
        self._num_extended = 0
        """Steps that computed more than one token of a request: they open the horizon."""
        self._step = 0
        self._runs: tuple[SharedRun, ...] | None = None
        self._pools = tuple(map(PoolId, range(budget.num_pools)))
        self._more_pools = self._pools[1:]
        self._states = tuple(p for p in self._pools if cache.retentions[p].lifetime is Lifetime.STATE)
        self._stalled: set[Request] = set()

    # ------------------------------------------------------------ what is going on

    @property
    def running(self) -> Iterable[Request]:
        return self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row: for their turn, or landed and for a row only."""
        return len(self.waiting) + len(self._landed)

    @property
    def blocked_need(self) -> int:
        """Pages of pool 0 that the first request refused memory needs; 0 when none was."""
        return self._blocked_need if self.waiting else 0

    @property
    def ending(self) -> Iterable[Request]:
        """Requests that ended while their step runs: they keep their pages until it is committed."""
        return self._ended_in_flight

    def take_retracted(self) -> list[Request]:
        """Requests that gave their memory back since the last call; the owner decides how they resume."""
        taken, self._retracted = self._retracted, []
        return taken

    def take_yielded(self) -> list[Request]:
        """Waiting requests that gave up what they held since the last call."""
        taken, self._yielded = self._yielded, []
        return taken

    # ------------------------------------------------------------ another role

    @property
    def is_idle(self) -> bool:
        """Nobody waits, runs, or is ending. (Rows that the executor is still to close are told with the next plan.)"""
        has_requests = self.num_waiting or self._running or self._ended_in_flight or self._retracted or self._yielded
        return self._in_flight is None and not has_requests

    def become(self, config: SchedConfig) -> None:
        """Another engine takes over, with desks of its own. Raises StateError unless idle."""
        if not self.is_idle or config.max_running != self.config.max_running:
            raise StateError("a scheduler is taken over while it holds requests, or with other rows")
        self.config = config
        self.gatekeeper, self.fetch = OpenDoor(), None

    # ------------------------------------------------------------ admission

    def add(self, request: Request) -> None:
        """Queue a request: by arrival, or first if it is urgent."""
        self.waiting.push(request)
        if request in self._holders:
            self._holders.add(request)  # its place has changed

    def add_landed(self, request: Request) -> None:
        """Its pages have come from elsewhere, with the token drawn from them: it waits for its row only."""
        request.num_finite = request.num_computed
        self._landed[request] = None

    def hold(self, request: Request) -> None:
        """A request that waits keeps what it has, if anything, as long as nobody needs it more."""
        if request.num_pages:
            self._holders.add(request)

    def unhold(self, request: Request) -> None:
        """What it has is not to be taken from it any more."""
        self._holders.discard(request)

    def enter(self, request: Request) -> None:
        """It was promised a row: its pages are on their way."""
        self._entering[request] = None

    def admit(self, now: float) -> list[Request]:
        """Give rows and pages to waiting requests: those landed, then the queue in its order."""
        admitted = self._admit_landed()
        before, seen = self._seen, self._look(now)
        if not self.waiting or (before is not None and before.forestalls(seen)):
            return admitted
        booking = self._book()
        if not booking.is_full and (self.fetch is not None or not booking.is_late):
            only_new = before is not None and before.settles(seen)
            if not only_new:
                self._blocked_need = 0
            take = self.waiting.take_new if only_new else self.waiting.take
            admitted += take(lambda request: self._try(request, booking, now), now)
        self._seen = self._look(now)
        return [request for request in admitted if request in self._running]

    def look_again(self) -> None:
        """Something that the gatekeeper's answers depend on has changed."""
        self._seen = None

    def _look(self, now: float) -> _Seen:
        rows = self._rows.num_free - len(self._entering)
        time = int(now / _LOOK_AGAIN_S)
        moves = (self.waiting.num_discarded, self._cache.version, rows, self._num_extended, time)
        return _Seen(self.waiting.num_pushed, moves, tuple(map(self._budget.available, self._pools)))

    def _admit_landed(self) -> list[Request]:
        admitted = []
        for request in [*islice(self._landed, self._rows.num_free)]:
            del self._landed[request]
            self._entering.pop(request, None)
            self._take_row(request)
            admitted.append(request)
        return admitted

    def _book(self) -> _Booking:
        step_len = self.config.step_len
        missing = [r.num_tokens - r.num_computed for r in self._running]
        booked = sum(min(tokens, step_len) for tokens in missing if tokens > 1)
        return _Booking(
            horizon_left=HORIZON_STEPS * step_len - booked,
            has_long=any(tokens > step_len for tokens in missing),
            reserve=self._sum(map(self._reserve_of, (*self._running, *self._entering))),
            num_rows=self._rows.num_free - len(self._entering),
            frontier=self._twins.frontier(self._running),
        )

    def _try(self, request: Request, booking: _Booking, now: float) -> TryOutcome:
        if booking.is_full:
            return TryOutcome.HELD_BACK
        if request.origin is Origin.FETCHED:
            reserve = self._reserve_beside(request, booking)
            verdict = self.fetch(request, reserve, now) if self.fetch is not None else TryOutcome.HELD_BACK
        elif not self.gatekeeper.may_start(request):
            return TryOutcome.HELD_BACK  # what most of a long queue waits for: asked before anything that costs more
        else:
            verdict = self._try_computed(request, booking)
        if verdict is TryOutcome.TAKEN:
            booking.num_rows -= 1
            booking.reserve = self._sum((booking.reserve, self._reserve_of(request)))
            booking.frontier |= self._twins.frontier((request,))
        elif verdict is TryOutcome.NO_ROOM:
            self._count_blocked(request)
        return verdict

    def _count_blocked(self, request: Request) -> None:
        page_size = self.config.page_size
        num_cached = request.lease.num_pages if request.lease else request.matched_len // page_size
        self.num_blocked += 1
        self._blocked_need = self._blocked_need or -(-request.num_tokens // page_size) - num_cached

    def _try_computed(self, request: Request, booking: _Booking) -> TryOutcome:
        waits_for_long = booking.has_long and request.num_tokens - request.matched_len > self.config.step_len
        may_start = not booking.is_late and not waits_for_long and not self._twins.holds_back(request)
        if not may_start:
            return TryOutcome.HELD_BACK
        matches = self._uses_tree(request) and request.sampling.prompt_logprobs is None
        limit = request.num_tokens - 1 if matches else 0
        match = self._cache.match(request.namespace, request.tokens, request.keys, limit)
        request.matched_len = match.num_tokens
        twin = booking.frontier.get(self._twins.key_after(request, match.num_tokens)) if matches else None
        if twin is not None:
            self._twins.hold_back(request, twin)
            return TryOutcome.HELD_BACK
        missing = request.num_tokens - match.num_tokens
        if booking.has_long and missing > self.config.step_len:
            return TryOutcome.HELD_BACK
        claim = self.gatekeeper.claim(request, match.num_tokens)
        if claim is Claim.NOTHING:
            return TryOutcome.HELD_BACK
        if not self._start(request, match, claim, self._reserve_beside(request, booking)):
            return TryOutcome.NO_ROOM if claim is Claim.FULL else TryOutcome.HELD_BACK
        booking.horizon_left -= min(missing, self.config.step_len)
        booking.has_long |= missing > self.config.step_len
        return TryOutcome.TAKEN

    def _start(self, request: Request, match: Match, claim: Claim, reserve: Needs) -> bool:
        """Lease the match, take the other pages and a row; or nothing."""
        lease = self._cache.lease(match)
        missing = -(-request.num_tokens // self.config.page_size) - lease.num_pages
        leased = (lease.num_pages - lease.first_page(pool) for pool in self._pools)
        most = zip(self._most_pages(request.num_tokens), leased, strict=True)
        needs = tuple(min(missing, max(0, count - held)) for count, held in most)
        if claim is Claim.FULL:
            self.yield_to(request, needs, reserve)
        at_once = tuple(min(1, need) if pool in self._states else need for pool, need in enumerate(needs))
        owned = self._budget.allocate(at_once) if self._budget.fits(needs, reserve) else None
        if owned is None:
            self._cache.release(lease)
            return False
        request.lease, request.num_computed = lease, lease.num_tokens
        request.own(owned, (lease.num_pages,) * len(owned))
        self._take_row(request)
        return True

    def _most_pages(self, num_tokens: int) -> Needs:
        """Pages of each pool that a request of so many tokens holds at once: windows and states go on with it."""
        size, ahead = self.config.page_size, self.config.chunk_len
        return tuple(kept.most_pages(num_tokens, ahead, size) for kept in self._cache.retentions)

    def yield_to(self, request: Request, needs: Needs, reserve: Needs) -> bool:
        """Whether `needs` can be had with `reserve` left over; requests behind it yield for them, or all that wait."""
        is_next = self.waiting.is_stalled_by(request)
        next_holder = self._holders.youngest_but if is_next else self._holders.youngest_behind
        while not self._budget.fits(needs, reserve):
            holder = next_holder(request)
            if holder is None:
                return False
            self._yield(holder)
        return True

    def _yield(self, holder: Request) -> None:
        self._holders.discard(holder)
        self._budget.free(holder.disown())
        if holder.lease is not None:
            self._cache.release(holder.lease)
            holder.lease = None
        self._yielded.append(holder)

    def _reserve_beside(self, request: Request, booking: _Booking) -> Needs:
        """Pages to leave when `request` enters; a lone one need leave none."""
        is_alone = not self._running and not self._entering
        return self._sum(()) if is_alone else self._sum((booking.reserve, self._reserve_of(request)))

    def _sum(self, needs: Iterable[Needs]) -> Needs:
        none = (0,) * self._budget.num_pools
        return tuple(map(sum, zip(none, *needs, strict=True)))

    def _reserve_of(self, request: Request) -> Needs:
        """Pages kept for a request's further output: what it can still use, at most the share each one gets.

        The share doubles with each retraction and shrinks slowly while there is none: with the static share a worker
        whose answers are long retracts and resumes without end (SGLang adapts its `new_token_ratio` likewise). Of other
        pools than the first a request needs no more than it holds once its window is full, or its state is kept.
        """
        share = int(self.config.reserve_len * self._reserve_scale)
        output_len = min(share, max(0, request.max_len - request.num_tokens))
        num_pages = -(-output_len // self.config.page_size)
        if not self._more_pools:
            return (num_pages,)
        most = self._most_pages(request.num_tokens + output_len)
        held = self._most_pages(request.num_tokens)
        if request.owned:
            held = tuple(map(request.num_held, self._pools))
        return (num_pages, *(max(0, will - has) for will, has in zip(most[1:], held[1:], strict=True)))

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
        self._free_behind()
        self._grow_rows()
        items = self._items()
        if not items and not self._rows.has_news:
            return None
        self._step += 1
        plan = StepPlan(
            step=StepIndex(self._step),
            items=tuple(items),
            work=WorkList(self.config.split_tokens, self._shared(items)),
            opens=self._rows.take_opens(),
            pages=(*self._page_updates(), *self._move_states(items)),
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

    def _free_behind(self) -> None:
        """Give up the pages that no token to come can see, and the states that are gone on from."""
        if not self._more_pools:
            return
        for request in self._running:
            for pool in self._more_pools:
                first = self._cache.retentions[pool].first_needed(request.num_computed, self.config.page_size)
                self._budget.free_pages(pool, request.give_up(pool, first))
            if request.lease is not None:
                self._cache.shrink(request.lease, request.num_computed)

    def _grow_rows(self) -> None:
        """Pages for what each row computes next: one now and then when it decodes; of other pools also in an extend."""
        self._stalled.clear()
        rows: Iterable[Request] = self._running
        if not self._more_pools:  # the first pool's pages are there for all tokens that were known
            rows = [r for r in rows if r.num_computed >= r.num_pages * self.config.page_size]
        hungry = {r: needs for r in rows if any(needs := self._lacking(r))}
        if hungry:
            self._budget.make_room(self._sum(hungry.values()))
        for request, needs in hungry.items():
            while request in self._running and request not in self._stalled:
                grown = self._budget.allocate(needs)
                if grown is None:
                    self._make_way(request)
                    continue
                for owned, pages in zip(request.owned, grown, strict=True):
                    owned.extend(pages)
                break

    def _lacking(self, request: Request) -> Needs:
        """Pages of each pool that the request's next chunk needs and it does not hold."""
        end = -(-min(request.num_tokens, request.num_computed + self.config.chunk_len) // self.config.page_size)
        return tuple(
            int(not request.owned[pool]) if pool in self._states else max(0, end - request.end_page(pool))
            for pool in self._pools
        )

    def _move_states(self, items: list[PlanItem]) -> Iterable[PageUpdate]:
        """An item's own slot takes the state at its end. One that it goes on from is the tree's by now, or is lost.

        After the other updates: the slot of a state that nobody keeps is read and written under two page indexes.
        """
        if not self._states:
            return ()
        requests = {request.row: request for request in self._running}
        for item in items:
            for pool in self._states:
                requests[item.row].move_state(pool, (item.q_start + item.q_len - 1) // self.config.page_size)
        return self._page_updates()

    def _make_way(self, request: Request) -> None:
        """Memory is short for a running row: the youngest waiting request yields, or the youngest running one.

        A lone extend waits instead: what it lacks is a window's page that is still being sent.
        """
        holder = self._holders.youngest()
        if holder is not None:
            self._yield(holder)
        elif self.num_running == 1 and request.num_tokens - request.num_computed > 1:
            self._stalled.add(request)
        else:
            self.retract(max(self._running, key=lambda r: r.arrival))
            self._reserve_scale = min(_MAX_RESERVE_SCALE, 2 * self._reserve_scale)

    def _items(self) -> list[PlanItem]:
        decoding: list[Request] = []
        extending: list[Request] = []
        for request in self._running:
            if request in self._stalled:
                continue
            (decoding if request.num_tokens - request.num_computed == 1 else extending).append(request)
        budget = self.config.step_len
        if decoding and self.config.extend_len_beside_decode is not None:
            budget = min(budget, self.config.extend_len_beside_decode)
        items = [self._item(request, 1) for request in decoding]
        return items + [self._item(request, q_len) for request, q_len in self._shares(extending, budget)]

    def _shares(self, extending: list[Request], budget: int) -> list[tuple[Request, int]]:
        """Tokens of each extend in this step.

        The oldest goes first if the step can end it. Otherwise it gets half, the others the other half, the shortest
        of them first, and what one half leaves over goes to the other. So a long prompt goes on at no less than half
        the pace, and a short one behind it waits for about one step.
        """
        if not extending:
            return []
        oldest, *others = extending
        is_long = oldest.num_tokens - oldest.num_computed > min(budget, self.config.chunk_len)
        kept = max(self.config.page_size, budget // 2) if others and is_long else budget
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

        A state is kept only where a chunk ends: with one, the last page multiple that a match may reach ends a chunk.
        """
        missing = request.num_tokens - request.num_computed
        allowed = min(self.config.chunk_len, budget)
        if missing <= allowed:
            whole = (missing - 1 + request.num_computed % self.config.page_size) // self.config.page_size
            if not whole or not self._states or not self._uses_tree(request):
                return missing
            allowed = missing - 1
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
            if request.row is None:
                continue
            for pool in self._pools:
                known, end = request.tabled.get(pool, 0), request.end_page(pool)
                if known < end:
                    for first, pages in request.spans(pool, known):
                        yield PageUpdate(request.row, pool, first, pages)
                    request.tabled[pool] = end

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> list[StepProgress]:
        """Apply a step's result. Results of requests that ended meanwhile are dropped, their pages given back."""
        if self._in_flight is None or result.step != self._step:
            raise StateError(f"result of step {result.step} while step {self._step} is expected")
        rows, self._in_flight = self._in_flight, None
        self._reserve_scale = max(1.0, self._reserve_scale * _RESERVE_DECAY)
        progress = [self._apply(*rows[item.row], item) for item in result.items if item.row in rows]
        ended, self._ended_in_flight = self._ended_in_flight, {}
        for request in ended:
            self._give_back(request)
        return [p for p in progress if p.request not in ended]

    def _apply(self, request: Request, planned: PlanItem, result: ItemResult) -> StepProgress:
        if result.outcome is not ItemOutcome.FAILED:
            request.num_computed = planned.q_start + planned.q_len
        if result.outcome is not ItemOutcome.COMPUTED:
            self._distrust(request, result.outcome)
        self._num_extended += planned.q_len > 1
        if result.sampled is not None:
            request.append(result.sampled.token)
            request.num_finite = request.num_computed
            if planned.q_len > 1:
                self._runs = None  # it decodes from now on and may share
        return StepProgress(request, planned.q_start, result.sampled, result.outcome, result.prompt_logprobs)

    def _distrust(self, request: Request, outcome: ItemOutcome) -> None:
        """What the step wrote is not handed on. Any page that no token was drawn from may be why its output is not
        finite: none of them is matched again."""
        if outcome is ItemOutcome.NOT_FINITE and self._uses_tree(request):
            sound = request.num_finite // self.config.page_size
            self._cache.poison(request.namespace, request.tokens, request.keys, sound)
        request.cache = CacheUse.BYPASS

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
        firsts = tuple(request.owned_first)
        pages = tuple(tuple(request.give_up(pool, full)) for pool in self._pools)
        insertion = self._cache.insert(lease, request.namespace, request.tokens, request.keys, pages)
        request.lease = insertion.lease
        for pool in self._pools if insertion.num_adopted_pages else self._more_pools:  # a twin's instead of its own
            request.tabled[pool] = min(request.tabled.get(pool, 0), firsts[pool])
        self._runs = None

    def leave(self, request: Request) -> None:
        """Give up the row, keep the pages: a computed prompt whose pages are still to be sent."""
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
        self._landed.pop(request, None)
        self._entering.pop(request, None)
        self._holders.discard(request)
        self._twins.forget(request)
        if self.is_in_flight(request):
            self._ended_in_flight[request] = None
            return
        self._give_back(request)

    def retract(self, request: Request) -> None:
        """Take everything from a running request; what it computed stays in the tree for its return."""
        self.share_computed(request)
        self._give_back(request)
        request.start_over()
        request.num_retractions += 1
        self.num_retractions += 1
        request.is_urgent = True
        self._retracted.append(request)

    def _give_back(self, request: Request) -> None:
        self._running.pop(request, None)
        self._drop_row(request)
        self._budget.free(request.disown())
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
