"""Who runs: requests with a row, in the order in which they took it; what they hold, hand to the tree, and give back.

enter -> [running] -> leave (computed for somebody else: keeps its pages until they are sent)
                   |-> retract (memory ran out: commit to the tree, give everything back)
                   |-> give_back (it leaves nothing, or goes on elsewhere)
                   |-> end
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from deltaserve.control.cache.prefix_cache import Match, PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.checkpoints import Checkpoints
from deltaserve.control.sched.decode_set import DecodeSet
from deltaserve.control.sched.needs import Needs, PageNeeds
from deltaserve.control.sched.plan import DecodeRows, RowOpen, SharedRun
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.step_target import StepTarget
from deltaserve.control.sched.worklist import leased_rows, shared_runs
from deltaserve.core.errors import IntegrityError, StateError
from deltaserve.core.ids import Namespace, PageId, PoolId, RowId
from deltaserve.core.wire.messages import CacheUse

_MAX_RESERVE_SCALE = 16.0
_RESERVE_DECAY = 0.98


class Rows:
    """Hands out `num_rows` rows. A row taken and given back before a plan was made is never told to the executor."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = [RowId(row) for row in reversed(range(num_rows))]
        self._opens: list[Request] = []
        self._closes: list[RowId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_news(self) -> bool:
        """Whether the executor must be told to close rows."""
        return bool(self._closes)

    def take(self, request: Request) -> None:
        request.row = self._free.pop()
        request.tabled.clear()
        self._opens.append(request)

    def give_back(self, request: Request) -> None:
        """Having no row is fine."""
        row = request.row
        if row is None:
            return
        if request in self._opens:
            self._opens.remove(request)
        else:
            self._closes.append(row)
        self._free.append(row)
        request.row = None

    def take_opens(self) -> tuple[RowOpen, ...]:
        opens, self._opens = self._opens, []
        return tuple(_open(request) for request in opens)

    def take_closes(self) -> tuple[RowId, ...]:
        closes, self._closes = self._closes, []
        return tuple(closes)


def _open(request: Request) -> RowOpen:
    if request.row is None:
        raise StateError("a request to be opened has no row")
    start, request.draft_start = request.draft_start, None  # known of its present pages alone
    return RowOpen(request.row, request.sampling, bytes(request.tokens), request.prompt_len, start)


class Running:
    """Rows and the requests in them: what admission fills and steps compute."""

    def __init__(
        self, config: SchedConfig, cache: PrefixCache, budget: Budget, seed_of: Callable[[Namespace], bytes]
    ) -> None:
        self.config = config
        self.needs = PageNeeds(config, cache.retentions)
        self.checkpoints: Checkpoints | None = None
        """Which states are kept; None for a model without recurrent states."""
        if self.needs.state_pools:
            self.checkpoints = Checkpoints(config.grid_len, config.state_interval_len)
        self.rows = Rows(config.max_running)
        self.step_target = StepTarget(config.step_target_s)
        self.requests: dict[Request, None] = {}
        self.decoding = DecodeSet(config.page_size)
        """Those that go on by a token in every step."""
        self.others: dict[Request, None] = {}
        """All others: each of their steps is planned for itself."""
        self.ending: dict[Request, Callable[[Request], None]] = {}
        """Ended while steps name it |-> how it gives back what it holds."""
        self._moved: dict[Request, None] = {}
        self._cache = cache
        self._budget = budget
        self._seed_of = seed_of
        self._runs: tuple[SharedRun, ...] | None = None
        self._shown_to: tuple[DecodeRows | None, tuple[RowId, ...]] = None, ()
        """Decode rows that `_shown` was made for."""
        self._shown: tuple[SharedRun, ...] = ()
        self._retracted: list[Request] = []
        self._reserve_scale = 1.0
        self.num_retractions = 0
        self.num_extended = 0
        """Chunks of more than one token computed so far, and planned where steps are planned behind these: they make
        room for further prompts."""

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self.requests

    def become(self, config: SchedConfig) -> None:
        """Another role's lengths; rows stay."""
        self.config = config
        self.needs = PageNeeds(config, self._cache.retentions)
        self.step_target.aim_at(config.step_target_s)

    def count_extended(self) -> None:
        """A chunk of more than one token was planned, or computed."""
        self.num_extended += 1

    def num_open_rows(self, num_promised: int) -> int:
        """Rows for further requests, where so many of the free ones are promised."""
        most = self.step_target.most_rows(self.rows.num_rows) - len(self.requests)
        return min(self.rows.num_free, most) - num_promised

    def uses_tree(self, request: Request) -> bool:
        return self.config.radix_cache and request.cache is CacheUse.NORMAL

    def shares_prompt(self, request: Request) -> bool:
        """Whether it takes from the tree what others computed of its prompt: logprobs need every position computed."""
        return self.uses_tree(request) and request.sampling.prompt_logprobs is None

    def feeds_tree(self, request: Request) -> bool:
        """Whether it runs, and will hand further pages of its prompt to the tree."""
        is_computing = request in self.requests and request not in self.ending
        return is_computing and _is_extending(request) and self.uses_tree(request)

    @property
    def only_decodes(self) -> bool:
        """Whether requests run, and each lacks the KV of its last token alone."""
        return bool(self.requests) and not any(map(_is_extending, self.others))

    # ------------------------------------------------------------ in and out

    def enter(self, request: Request) -> None:
        """Give the request a row."""
        self.rows.take(request)
        self.requests[request] = self.others[request] = None
        self._runs = None

    def leave(self, request: Request) -> None:
        """Give up the row, keep the pages: a computed prompt whose pages are still to be sent."""
        self.requests.pop(request)
        self._drop_row(request)

    def give_back(self, request: Request) -> None:
        """Row, pages and lease, as far as it has them."""
        self.requests.pop(request, None)
        self._drop_row(request)
        self._budget.reclaim(request)

    def end(self, request: Request) -> None:
        """`give_back` of one that is complete, or wanted no more: its hints count."""
        self._budget.settle(request)
        self.give_back(request)

    def end_behind_step(self, request: Request) -> None:
        """The end of one that a step has gone on with meanwhile: what it had computed stays in the tree, its states,
        which have taken in more than that, do not."""
        if self._has_news(request):
            self._hand_over(request, self.needs.token_pools)
        self.end(request)

    def share_under_step(self, request: Request, num_kept: int) -> None:
        """Hand over what was computed of the first `num_kept` tokens while a step still reads it: only where the tree
        has none of those pages, for where another request was first ours would be freed, and written anew under the
        step: it is `late_to_share` then. Another may also have been first with windows that were gone before the end of
        the lease."""
        lease, page_size = request.lease, self.config.page_size
        num_pages = min(request.num_computed, num_kept) // page_size
        if lease is None or not self.uses_tree(request) or num_pages <= lease.num_pages:
            return
        pools = self.needs.token_pools
        if any(request.owned[pool] and request.owned_first[pool] < lease.num_pages for pool in pools):
            return
        request.grow_keys(self._seed_of(request.namespace), page_size, num_pages)
        known = self._cache.match(request.namespace, request.tokens, request.keys, num_pages * page_size)
        request.late_to_share |= known.reach != lease.num_tokens  # less: what it leases is matched no more
        if not request.late_to_share:
            self._hand_over(request, pools, num_pages)

    def retract(self, request: Request) -> None:
        """Take everything from a request; what it computed stays in the tree for its return."""
        self.leave_computed(request)
        self.give_back(request)
        request.start_over()
        request.num_retractions += 1
        self.num_retractions += 1
        request.is_urgent = True
        self._retracted.append(request)
        self._reserve_scale = min(_MAX_RESERVE_SCALE, 2 * self._reserve_scale)

    def take_retracted(self) -> list[Request]:
        """Requests retracted since the last call; the owner decides how they resume."""
        taken, self._retracted = self._retracted, []
        return taken

    @property
    def has_retracted(self) -> bool:
        """Whether somebody is still to be taken by `take_retracted`."""
        return bool(self._retracted)

    def _drop_row(self, request: Request) -> None:
        self.decoding.leave(request)
        self.others.pop(request, None)
        self._moved.pop(request, None)
        self.rows.give_back(request)
        self._runs = None

    def end_later(self, request: Request, leave: Callable[[Request], None]) -> None:
        """The request has ended while steps name it: `leave` is for their end."""
        self.ending.setdefault(request, leave)
        self.falls_out(request)

    # ------------------------------------------------------------ who goes on by a token in every step

    @property
    def may_go_on(self) -> bool:
        """Whether requests decode alike from step to step: no guesses, no windows that pages leave, no states."""
        return not self.config.max_drafts and not self.needs.more_pools

    def goes_on(self, request: Request, position: int) -> None:
        """The request drew a token in the step before, computes this position in the next one, and so on."""
        del self.others[request]
        self.decoding.join(request, position)
        self._moved[request] = None

    def falls_out(self, request: Request) -> None:
        """The request does not go on like that; it still runs."""
        if request in self.decoding:
            self.decoding.leave(request)
            self._moved.pop(request, None)
            self.others[request] = None

    def grow(self, request: Request, pages: Sequence[Sequence[PageId]]) -> None:
        """Give one that runs further pages, per pool."""
        request.grow(pages)
        if request in self.decoding:
            self.decoding.grown(request)
            self._moved[request] = None

    def take_moved(self) -> Iterable[Request]:
        """Those of whose pages the executor's table may lack some, or have some that are not theirs now."""
        moved, self._moved = self._moved, {}
        return (*moved, *self.others)

    # ------------------------------------------------------------ the tree

    def note_fork(self, request: Request, match: Match) -> None:
        """Note that the prompt is known further than it can go on from: a state is kept as far as that, for the
        next one."""
        if self.checkpoints is not None:
            fork = self.checkpoints.fork(match.num_tokens, match.reach)
            request.forks = set() if fork is None else {fork}

    def next_stop(self, request: Request) -> int | None:
        """The next position at which a chunk of it must end, because its state is kept."""
        if self.checkpoints is None or not self.uses_tree(request):
            return None
        return self.checkpoints.next_stop(request)

    def most_drafts(self, request: Request) -> int:
        """Guesses that a step may verify: up to its last token, and to the next place where a state may be kept."""
        most = request.max_len - request.num_tokens - 1
        if self.checkpoints is not None:
            most = min(most, self.checkpoints.next_point(request) - request.num_tokens)
        return most

    def step_back(self, request: Request) -> None:
        """Note that the states took in fewer tokens than planned: the request's own slot is that of what is
        computed."""
        last = (request.num_computed - 1) // self.config.page_size
        for pool in self.needs.state_pools:
            request.move_state(pool, last)
            request.tabled[pool] = min(request.tabled.get(pool, 0), last)

    def share_step(self, request: Request, *, is_extend: bool) -> None:
        """After a step: hand over what an extend computed, now or before; of decode steps only what ends at a
        checkpoint."""
        is_checkpoint = self.checkpoints is not None and self.checkpoints.is_due(request)
        if is_checkpoint or is_extend or request.late_to_share:
            request.late_to_share = False
            self.share_computed(request)

    def share_computed(self, request: Request) -> None:
        """Hand the request's full computed pages to the tree; where another request was first, adopt its pages.

        Where a checkpoint is due its states go along, and it goes on in other slots: if there are none they stay.
        """
        if not self._has_news(request):
            return
        checkpoints = self.checkpoints
        if checkpoints is None or not checkpoints.is_due(request):
            self._hand_over(request, self.needs.token_pools)
            return
        self._forget_passing(request)
        slots = self._budget.allocate(self.needs.one_state)
        if slots is None:
            self._hand_over(request, self.needs.token_pools)
            return
        self._hand_over(request, self.needs.pools)
        for pool in self.needs.state_pools:
            request.own_state(pool, slots[pool][0])
        if checkpoints.is_passing(request):
            request.passing_state = request.num_computed

    def leave_computed(self, request: Request) -> None:
        """Leave to the tree what was computed, when the request goes on no more: it needs no other slots."""
        if not self._has_news(request):
            return
        if self.checkpoints is not None and self.checkpoints.is_due(request):
            self._forget_passing(request)
            self._hand_over(request, self.needs.pools)
        else:
            self._hand_over(request, self.needs.token_pools)

    def _has_news(self, request: Request) -> bool:
        """Whether it has computed full pages that are not in its lease, and may hand them over."""
        lease = request.lease
        if lease is None or not self.uses_tree(request):
            return False
        return request.num_computed // self.config.page_size > lease.num_pages

    def _hand_over(self, request: Request, pools: Sequence[PoolId], num_pages: int | None = None) -> None:
        """Hand over the full computed pages of these pools to the tree, or the first `num_pages`; of the other pools
        none."""
        lease, page_size = request.lease, self.config.page_size
        if lease is None:
            return
        full = request.num_computed // page_size if num_pages is None else num_pages
        request.grow_keys(self._seed_of(request.namespace), page_size, full)
        firsts = tuple(request.owned_first)
        pages = tuple(tuple(request.give_up(p, full)) if p in pools else () for p in self.needs.pools)
        insertion = self._cache.insert(lease, request.namespace, request.tokens, request.keys, pages)
        request.lease = insertion.lease
        changed = self.needs.pools if insertion.num_adopted_pages else self.needs.more_pools
        for pool in changed:  # another request's instead of its own
            request.tabled[pool] = min(request.tabled.get(pool, 0), firsts[pool])
        if request in self.decoding:
            self._moved[request] = None
        self._runs = None

    def _forget_passing(self, request: Request) -> None:
        """The state that decoding has left last is of no use beside a later one."""
        if request.lease is not None and request.passing_state is not None:
            self._cache.forget_states(request.lease, request.passing_state)
        request.passing_state = None

    def starts_to_decode(self) -> None:
        """A request has one token to compute: it may share what it reads with other decode rows."""
        self._runs = None

    def shared_runs(self, going_on: DecodeRows | None, others: tuple[RowId, ...]) -> tuple[SharedRun, ...]:
        """What decode rows read in common: settled when a row opens, closes or shares pages, not every step. The same
        object as before when it is the same.

        `others`: decode rows beside those of `going_on`. A row that has drawn its last token, in a step that is not
        committed yet, is in no item any more.
        """
        if self._runs is not None and self._shown_to[0] is going_on and self._shown_to[1] == others:
            return self._shown
        decoding = {*others} if going_on is None else {*going_on.rows, *others}
        if self._runs is None:
            leases = ((r.row, r.lease) for r in self.requests if r.row in decoding and r.lease is not None)
            self._runs = shared_runs(leased_rows(leases), self.config.split_tokens)
        shown = self._runs
        if not all(decoding.issuperset(run.rows) for run in shown):
            rest = (replace(run, rows=tuple(row for row in run.rows if row in decoding)) for run in shown)
            shown = tuple(run for run in rest if len(run.rows) > 1)
        self._shown_to = going_on, others
        self._shown = self._shown if self._shown == shown else shown
        return self._shown

    # ------------------------------------------------------------ pages kept for output

    def reserve_of(self, request: Request) -> Needs:
        """Pages kept for a request's further output: what it can still use, at most the share each one gets.

        The share doubles with each retraction and shrinks slowly while there is none: with the static share a worker
        whose answers are long retracts and resumes without end (SGLang adapts its `new_token_ratio` likewise).
        """
        return self.needs.of_output(request, min(self._share, max(0, request.max_len - request.num_tokens)))

    def reserve(self) -> Needs:
        """Pages kept for the further output of all of them."""
        share = self._share
        lens = [min(share, max(0, r.max_len - r.num_tokens)) for r in self.decoding]
        return self.needs.total((self.needs.of_outputs(lens), *map(self.reserve_of, self.others)))

    @property
    def _share(self) -> int:
        """Tokens of further output that pages are kept for, at most."""
        return int(self.config.reserve_len * self._reserve_scale)

    def decay_reserve(self) -> None:
        """Let the reserve shrink towards its base; called once per step."""
        self._reserve_scale = max(1.0, self._reserve_scale * _RESERVE_DECAY)

    # ------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Rows are held once; every running request holds pages for what it computed."""
        rows = [r.row for r in self.requests]
        if len(set(rows)) != len(rows) or len(rows) + self.rows.num_free != self.rows.num_rows:
            raise IntegrityError(f"rows: {len(rows)} held, {self.rows.num_free} free of {self.rows.num_rows}")
        if (
            self.decoding.members() & self.others.keys()
            or self.decoding.members() | self.others.keys() != self.requests.keys()
        ):
            raise IntegrityError(f"{len(self.decoding)} requests go on, {len(self.others)} others, {len(rows)} in all")
        self.decoding.check_integrity()
        for request in self.requests:
            if request.num_computed > request.num_pages * self.config.page_size:
                raise IntegrityError(f"{request.num_computed} tokens computed in {request.num_pages} pages")
            if not 0 <= request.num_computed <= request.num_tokens:
                raise IntegrityError(f"{request.num_computed} tokens computed of {request.num_tokens}")


def _is_extending(request: Request) -> bool:
    return request.num_tokens - request.num_computed > 1
