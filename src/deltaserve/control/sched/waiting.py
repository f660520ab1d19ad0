"""Requests without a row, and when they get one: admission.

    add -> [queue] -> admit -> running
           [landed] -> |        pages have come from elsewhere: only a row is missing

A prompt is admitted when the steps before it are nearly through: while less than two steps' worth of tokens is
admitted and not computed. So memory is taken shortly before it is used, and one that is admitted starts soon. Of
prompts longer than a step one at a time is admitted; shorter ones go beside it.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NamedTuple, Protocol

from deltaserve.control.cache.prefix_cache import Match, PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.duplicates import Duplicates, Frontier
from deltaserve.control.sched.holders import Holders
from deltaserve.control.sched.needs import Needs
from deltaserve.control.sched.policy import POLICIES
from deltaserve.control.sched.queue import FairQueue, TryOutcome
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.sched.running import Running

HORIZON_STEPS = 2
"""Steps' worth of tokens that are admitted ahead of being computed."""
_LOOK_AGAIN_S = 0.1
"""Seconds until waiting requests are tried again although nothing changed: links come back, waits for others end."""


class Claim(Enum):
    """What a request may take when its turn comes."""

    NOTHING = "nothing"
    """Nothing now: it waits for somebody else."""
    SPARE = "spare"
    """Memory nobody holds: it is computed ahead of being asked for."""
    FULL = "full"
    """Memory nobody holds, and what requests behind it hold while they wait."""


class RequestOwner(Protocol):
    """Whoever queued the requests: says which may start, beyond what rows, steps and memory allow."""

    def may_start(self, request: Request) -> bool:
        """Asked often and first; looks nothing up."""
        ...

    def claim(self, request: Request, cached_len: int) -> Claim:
        """The request's turn has come, with `cached_len` tokens in the cache."""
        ...

    def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
        """Try to have the pages of a request of origin FETCHED sent here, and leave `reserve` pages of each pool."""
        ...


class NoOwner:
    """Everything queued may be computed, and nothing comes from elsewhere."""

    def may_start(self, request: Request) -> bool:
        return True

    def claim(self, request: Request, cached_len: int) -> Claim:
        return Claim.FULL

    def fetch(self, request: Request, reserve: Needs) -> TryOutcome:
        return TryOutcome.HELD_BACK


NO_OWNER = NoOwner()


class _Seen(NamedTuple):
    """What the last try of all waiting requests depended on."""

    num_pushed: int
    """Requests queued so far: a new one is to be tried, and lets in nobody else."""
    others: tuple[int, ...]
    """Who left, version of the cache, rows, steps, time: each may let in somebody who was not let in."""
    available: tuple[int, ...]
    """Pages per pool: only more of them may."""

    def forestalls(self, later: "_Seen") -> bool:
        """Whether trying again can come to nothing else."""
        return self == later or (self.num_pushed == later.num_pushed and self.settles(later))

    def settles(self, later: "_Seen") -> bool:
        """Whether trying those again who were there can come to nothing else."""
        is_no_more = all(now <= then for now, then in zip(later.available, self.available, strict=True))
        return self.others == later.others and is_no_more


@dataclass(slots=True)
class _Booking:
    """What is promised so far, while one call of `admit` runs."""

    owner: RequestOwner
    horizon_left: int
    """Tokens that may still be booked for the next steps."""
    has_long: bool
    """Whether somebody computes who needs more than a whole step behind what is planned."""
    reserve: Needs
    """Pages kept for what those running or entering have not taken yet, per pool."""
    num_rows: int
    """Rows that nobody is promised."""
    frontier: Frontier
    """Running requests that those waiting may have pages in common with."""

    @property
    def is_full(self) -> bool:
        return self.num_rows <= 0

    @property
    def is_late(self) -> bool:
        """Whether what is admitted keeps the next steps busy."""
        return self.horizon_left <= 0


class Waiting:
    """Who waits here: to be computed, for pages from elsewhere, or landed and for a row only."""

    def __init__(self, cache: PrefixCache, budget: Budget, running: Running) -> None:
        self._cache = cache
        self._budget = budget
        self._running = running
        self.queue = FairQueue(POLICIES[running.config.policy](cache))
        self.holders = Holders(self.queue.__contains__, budget.reclaim)
        self._landed: dict[Request, None] = {}
        self._entering: dict[Request, None] = {}
        self._duplicates = Duplicates(running.config.page_size, running.feeds_tree, running.checkpoints)
        self.num_blocked = 0
        """How often a waiting request was refused memory."""
        self._blocked_need = 0
        self._seen: _Seen | None = None

    def __len__(self) -> int:
        return len(self.queue) + len(self._landed)

    @property
    def blocked_need(self) -> int:
        """Pages of pool 0 that the first request refused memory needs; 0 when none was."""
        return self._blocked_need if self.queue else 0

    # ------------------------------------------------------------ who comes and goes

    def add(self, request: Request) -> None:
        """Queue a request: by arrival, or first if it is urgent."""
        self.queue.push(request)
        if request.origin is Origin.COMPUTED and self._running.shares_prompt(request):
            self._duplicates.add(request)
        if request in self.holders:
            self.holders.add(request)  # its place has changed

    def add_landed(self, request: Request) -> None:
        """Add a request whose pages have come from elsewhere: it waits for its row only."""
        self._landed[request] = None

    def hold(self, request: Request) -> None:
        """A request that waits keeps what it has, if anything, as long as nobody needs it more."""
        if request.num_pages:
            self.holders.add(request)

    def unhold(self, request: Request) -> None:
        """What it has is not to be taken from it any more."""
        self.holders.discard(request)

    def enter(self, request: Request) -> None:
        """Note that the request was promised a row: its pages are on their way."""
        self._entering[request] = None

    def forget(self, request: Request) -> None:
        """Forget the request if it waits."""
        self.queue.discard(request)
        self._landed.pop(request, None)
        self._entering.pop(request, None)
        self.holders.discard(request)
        self._duplicates.forget(request)

    # ------------------------------------------------------------ admission

    def admit(self, now: float, owner: RequestOwner = NO_OWNER) -> list[Request]:
        """Give rows and pages to waiting requests: those landed, then the queue in its order, as `owner` allows."""
        admitted = self._admit_landed() if self._landed else []
        if not self.queue:
            return admitted
        before, seen = self._seen, self._look(now)
        if before is not None and before.forestalls(seen):
            return admitted
        booking = self._book(owner)
        if not booking.is_full:
            only_new = before is not None and before.settles(seen)
            if not only_new:
                self._blocked_need = 0
            take = self.queue.take_new if only_new else self.queue.take
            admitted += take(lambda request: self._try(request, booking), now)
        self._seen = self._look(now)
        return [request for request in admitted if request in self._running]

    def look_again(self) -> None:
        """Something that the owner's answers depend on has changed."""
        self._seen = None

    def _look(self, now: float) -> _Seen:
        rows = self._running.num_open_rows(len(self._entering))
        time = int(now / _LOOK_AGAIN_S)
        moves = (self.queue.num_discarded, self._cache.version, rows, self._running.num_extended, time)
        return _Seen(self.queue.num_pushed, moves, tuple(map(self._budget.available, self._running.needs.pools)))

    def _admit_landed(self) -> list[Request]:
        admitted = []
        for request in [*islice(self._landed, self._running.rows.num_free)]:
            del self._landed[request]
            self._entering.pop(request, None)
            self._running.enter(request)
            admitted.append(request)
        return admitted

    def _book(self, owner: RequestOwner) -> _Booking:
        running, step_len = self._running, self._running.config.step_len
        computing = [request for request in running.others if request not in running.ending]
        missing = [r.num_tokens - r.num_computed for r in computing]  # of those that decode on and on 1 each
        booked = sum(min(tokens, step_len) for tokens in missing if tokens > 1)
        return _Booking(
            owner=owner,
            horizon_left=HORIZON_STEPS * step_len - booked,
            has_long=any(request.num_tokens - self._come_to(request) > step_len for request in computing),
            reserve=running.needs.total((running.reserve(), *map(running.reserve_of, self._entering))),
            num_rows=running.num_open_rows(len(self._entering)),
            frontier=self._duplicates.frontier(computing),
        )

    def _come_to(self, request: Request) -> int:
        """Tokens of one that runs that the next step is planned behind."""
        if not self._running.config.plans_behind_prompts:
            return request.num_computed
        return max(request.num_computed, request.num_planned)

    def _try(self, request: Request, booking: _Booking) -> TryOutcome:
        if booking.is_full:
            return TryOutcome.HELD_BACK
        if request.origin is Origin.FETCHED:
            verdict = booking.owner.fetch(request, self._reserve_beside(request, booking))
        elif not booking.owner.may_start(request):
            return TryOutcome.HELD_BACK  # what most of a long queue waits for: asked before anything that costs more
        else:
            verdict = self._try_computed(request, booking)
        if verdict is TryOutcome.TAKEN:
            booking.num_rows -= 1
            booking.reserve = self._running.needs.total((booking.reserve, self._running.reserve_of(request)))
            self._duplicates.note(request, booking.frontier)
        elif verdict is TryOutcome.NO_ROOM:
            self._count_blocked(request)
        return verdict

    def _count_blocked(self, request: Request) -> None:
        page_size = self._running.config.page_size
        num_cached = request.lease.num_pages if request.lease else request.matched_len // page_size
        self.num_blocked += 1
        self._blocked_need = self._blocked_need or -(-request.num_tokens // page_size) - num_cached

    def _try_computed(self, request: Request, booking: _Booking) -> TryOutcome:
        step_len = self._running.config.step_len
        waits_for_long = booking.has_long and request.num_tokens - request.matched_len > step_len
        may_start = not booking.is_late and not waits_for_long and not self._duplicates.holds_back(request)
        if not may_start:
            return TryOutcome.HELD_BACK
        matches = self._running.shares_prompt(request)
        limit = request.num_tokens - 1 if matches else 0
        match = self._cache.match(request.namespace, request.tokens, request.keys, limit)
        request.matched_len = match.num_tokens
        if matches and self._duplicates.is_to_wait(request, match, booking.frontier):
            return TryOutcome.HELD_BACK
        missing = request.num_tokens - match.num_tokens
        if booking.has_long and missing > step_len:
            return TryOutcome.HELD_BACK
        claim = booking.owner.claim(request, match.num_tokens)
        if claim is Claim.NOTHING or (claim is Claim.SPARE and self.queue.is_stalled):
            return TryOutcome.HELD_BACK  # else two that are computed ahead in turn keep out who is asked for, for ever
        if not self._start(request, match, claim, self._reserve_beside(request, booking)):
            return TryOutcome.NO_ROOM if claim is Claim.FULL else TryOutcome.HELD_BACK
        booking.horizon_left -= min(missing, step_len)
        booking.has_long |= missing > step_len
        return TryOutcome.TAKEN

    def _start(self, request: Request, match: Match, claim: Claim, reserve: Needs) -> bool:
        """Lease the match, take the other pages and a row; or nothing."""
        lease = self._cache.lease(match)
        needs = self._running.needs.beside(lease, request.num_tokens)
        if claim is Claim.FULL:
            self.yield_to(request, needs, reserve)
        owned = self._budget.allocate(needs) if self._budget.fits(needs, reserve) else None
        if owned is None:
            self._cache.release(lease)
            return False
        request.lease = lease
        request.is_ahead = claim is Claim.SPARE
        request.begin_at(lease.num_tokens)
        request.own(owned, (lease.num_pages,) * len(owned))
        self._running.note_fork(request, match)
        self._duplicates.forget(request)
        self._duplicates.foresee(request)
        self._running.enter(request)
        return True

    def yield_to(self, request: Request, needs: Needs, reserve: Needs) -> bool:
        """Whether `needs` can be had with `reserve` left over; requests behind it yield for them, or all that wait."""
        is_next = self.queue.is_stalled_by(request)
        next_holder = self.holders.youngest_but if is_next else self.holders.youngest_behind
        while short := self._budget.short(needs, reserve):
            holder = next_holder(request, short)
            if holder is None:
                return False
            self.holders.reclaim(holder)
        return True

    def _reserve_beside(self, request: Request, booking: _Booking) -> Needs:
        """Pages to leave when `request` enters; a lone one need leave none."""
        is_alone = not self._running.requests and not self._entering
        needs = self._running.needs
        return needs.total(()) if is_alone else needs.total((booking.reserve, self._running.reserve_of(request)))
