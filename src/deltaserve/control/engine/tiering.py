"""Pages between the tree and the file under it: what enters the tree is copied there, what a prompt lacks comes back.

    in the tree -> pinned, StorePages -> stored: found by its key from then on
    a prompt's turn comes, the tree lacks what the file has -> pages taken, LoadPages -> loaded -> in the tree

Everything is stored at once, and so nothing has to be stored when it is evicted: eviction waits for nobody. A copy
costs much less than computing the page did, and which page will be asked for again is not known at its eviction either.

Of a model with windows or recurrent states a load ends where the file, or the tree, has all that going on there needs.
Who computes elsewhere sends windows and states anew: then keys and values of every token alone are loaded.

A request waits for a load as for another one that computes the same page, and is matched again when that is over. Pages
of a load are nobody's until they have been read and checked; then they enter the tree where the prefix before them is
still there, and are freed where it is not. A load that fails costs what the request computes anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.lease import Match
from deltaserve.control.cache.load_price import LoadPrice
from deltaserve.control.cache.newcomers import Newcomers
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.cache.tier import Tier
from deltaserve.control.cache.tree_changes import FiledEventLog
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.scheduler import Scheduler
from deltaserve.control.transfer.commands import LoadPages, PagesCopied, SlotCopy, StorePages
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.keys import KEY_BYTES, key_at, num_keys
from deltaserve.core.tokens import TOKEN_BYTES

_STORED_AT_ONCE = 32
"""Most pages of a pool in one StorePages."""
_STORES = 2
"""So many of them are under way at most."""
_STORED_SHARE = 32
"""A StorePages takes at most one page of a pool in so many: what it pins cannot be used anew before it is through."""
_SENT_BYTE_S = 1 / 3e8
"""Seconds of a byte that another worker sends, until that is measured."""
_LOADS_OF_REQUEST = 3
"""A request waits for so many loads at most. What was loaded may be evicted before its turn comes."""
_POOL_SHARE = 2
"""Several loads under way take at most one page of a pool in so many; a lone one what its request needs anyway."""
_FULL = 0
"""Number of the pool that keeps every token."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The file under the tree of one worker."""

    num_slots: tuple[int, ...]
    """Slots of each pool."""
    page_bytes: tuple[int, ...]
    """What a page of each pool takes, on all ranks together."""
    log: FiledEventLog
    """Is told which pages of the first pool the file holds."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a load brings of a path."""

    first: int
    """Page index from which on it is of use."""
    ranges: tuple[range, ...]
    """Page indexes that it reads, of each pool. All that are not empty have one end."""

    @property
    def end(self) -> int:
        """Page index up to which the path can be used then."""
        return self.ranges[_FULL].stop

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def has_tails(self) -> bool:
        return any(self.sizes[1:])


@dataclass(frozen=True, slots=True)
class Loadable:
    """What the file has of a prompt that the tree lacks."""

    num_tokens: int
    load_s: float
    """Seconds that loading it takes, as measured."""


@dataclass(slots=True, eq=False)
class _Load:
    """A stretch of a prompt on its way back."""

    request: Request
    """Who asked for it."""
    tokens: bytes
    keys: bytes
    """Tokens and keys up to its end."""
    stretch: _Stretch
    pages: tuple[list[PageId], ...]
    copies: tuple[SlotCopy, ...]
    """Those of the first pool, then of the others."""
    is_void: bool = False
    """What the file held is worthless, as is known by now."""

    @property
    def first_key(self) -> bytes:
        return key_at(self.keys, self.stretch.first)


class Tiering:
    """All that is copied between a worker's pools and its file."""

    def __init__(
        self, config: TierConfig, pools: Sequence[PagePool], cache: PrefixCache, budget: Budget, sched: Scheduler
    ) -> None:
        of_full, *of_tails = config.num_slots
        self.tiers = Tier(of_full, config.log), *map(Tier, of_tails)
        self._config = config
        self._pools = tuple(pools)
        self._cache = cache
        self._budget = budget
        self._sched = sched
        self._price = LoadPrice()
        self._batch_lens = [max(1, min(_STORED_AT_ONCE, pool.num_pages // _STORED_SHARE)) for pool in pools]
        self._newcomers = Newcomers(self.tiers, self.clear)
        cache.tell(self._newcomers)
        self._stores: dict[int, tuple[SlotCopy, ...]] = {}
        self._loads: dict[int, _Load] = {}
        self._coming: dict[bytes, int] = {}
        """First key of a load |-> its number."""
        self._next_number = 1
        self.num_loaded = 0
        """Pages that came back."""
        self.num_bad_slots = 0
        """Loads that met a slot which did not hold what it should."""
        self._num_stored = self._num_unstored = 0
        self._bytes_stored = self._bytes_loaded = self._tokens_loaded = 0

    # ------------------------------------------------------------ to the file

    def store_some(self, turn: EngineTurn) -> None:
        """Have pages copied that have entered the tree, the oldest first, as many as may be under way."""
        pools = range(len(self.tiers))
        while len(self._stores) < _STORES and any(map(self._newcomers.count, pools)):
            copies = tuple(copy for pool in pools for copy in self._copies_to_store(pool))
            if copies:
                for copy in copies:
                    self._pools[copy.pool].pin((copy.page,))
                number = self._number()
                self._stores[number] = copies
                turn.do(StorePages(number, copies))

    def leave_out(self, request: Request, first: int, end: int) -> None:
        """Leave out of the file what is to be written into pages yet that have entered the tree: those of a request's
        tokens [first, end)."""
        size = self._cache.page_size
        self._newcomers.leave_out(bytes(request.keys[first // size * KEY_BYTES : end // size * KEY_BYTES]))

    def _copies_to_store(self, pool: int) -> list[SlotCopy]:
        tier, copies = self.tiers[pool], []
        for key, page in self._newcomers.take(pool, self._batch_lens[pool]).items():
            if key in tier:
                tier.touch(key)
            elif (slot := tier.begin(key)) is not None:
                copies.append(SlotCopy(PoolId(pool), page, slot, key))
        return copies

    def on_copied(self, report: PagesCopied) -> None:
        if report.number in self._stores:
            self._on_stored(report)
        else:
            self._on_loaded(report)

    def _on_stored(self, report: PagesCopied) -> None:
        copies = self._stores.pop(report.number)
        for copy in copies:
            self._pools[copy.pool].unpin((copy.page,))
            tier = self.tiers[copy.pool]
            (tier.stored if report.problem is None else tier.failed)(copy.slot)
        if report.problem is None:
            self._num_stored += len(copies)
            self._bytes_stored += report.num_bytes
        else:
            self._num_unstored += 1

    # ------------------------------------------------------------ from the file

    def awaits(self, request: Request, match: Match, tokens_per_s: float, turn: EngineTurn) -> bool:
        """Whether a request that is computed here had better wait for what the file has beyond its `match`.

        It is on its way then, unless memory for it was promised and not to be had: in the next turn it is.
        `tokens_per_s`: at which prompts are computed here, 0 if it is not known.
        """
        keys = _keys_of(request, self._cache.page_size)
        if (waits := self._waits(request, key_at(keys, match.num_pages))) is not None:
            return waits
        stretch = self._reusable(match, keys)
        if stretch is None:
            return False
        num_tokens = (stretch.end - stretch.first) * self._cache.page_size
        return self._is_loaded(request, stretch, num_tokens / tokens_per_s if tokens_per_s else inf, turn)

    def loadable(self, request: Request, match: Match) -> Loadable | None:
        """What could be loaded beyond the `match` of a request that is computed here. None: nothing, no memory is to
        spare for it, or nobody knows yet how long that takes. Asking changes nothing."""
        stretch = self._reusable(match, _keys_of(request, self._cache.page_size))
        if stretch is None or self._sched.waiting.blocked_need or not self._has_memory(stretch.sizes):
            return None
        load_s = self._price.seconds(self._num_bytes(stretch.sizes))
        return None if load_s is None else Loadable((stretch.end - stretch.first) * self._cache.page_size, load_s)

    def awaits_kv(self, request: Request, match: Match, byte_s: float | None, turn: EngineTurn) -> bool:
        """`awaits` of a request that is computed elsewhere: what is loaded of it does not have to be sent. `byte_s`:
        seconds that a byte takes which is; None: not measured."""
        keys, reach = _keys_of(request, self._cache.page_size), match.reach // self._cache.page_size
        if (waits := self._waits(request, key_at(keys, reach))) is not None:
            return waits
        num_pages = self.tiers[_FULL].num_from(keys, reach)
        if not num_pages:
            return False
        end = reach + num_pages
        stretch = _Stretch(reach, (range(reach, end), *[range(end, end)] * (len(self.tiers) - 1)))
        return self._is_loaded(
            request, stretch, self._num_bytes(stretch.sizes) * (_SENT_BYTE_S if byte_s is None else byte_s), turn
        )

    def _waits(self, request: Request, first_key: bytes) -> bool | None:
        """Whether the request waits, if that is known without a look at the file. `first_key`: of the first page that
        it lacks; empty if it lacks none."""
        if first_key in self._coming:
            return True
        if request.num_loads == _LOADS_OF_REQUEST or self._sched.waiting.blocked_need:
            return False
        return None

    def _reusable(self, match: Match, keys: bytes | bytearray) -> _Stretch | None:
        """The longest path that can be used with what the file has; None if the match is as long."""
        reach = match.reach // self._cache.page_size
        end = min(num_keys(keys), reach + self.tiers[_FULL].num_from(keys, reach))
        tails = range(1, len(self.tiers))
        while end > match.num_pages:  # the last page that a pool lacks in tree and file bounds how far it may go
            lacking = [self.tiers[pool].last_missing(keys, self._tail(pool, match, end)) for pool in tails]
            shorter = min((index for index in lacking if index is not None), default=end)
            if shorter == end:
                full = range(min(reach, end), end)
                return _Stretch(match.num_pages, (full, *(self._tail(pool, match, end) for pool in tails)))
            end = shorter
        return None

    def _tail(self, pool: int, match: Match, end: int) -> range:
        """What the file has to give of a pool to go on at page index `end`: all of it, unless the tree has all."""
        size = self._cache.page_size
        if end * size <= match.reach and self._cache.holds(match, pool, end):
            return range(end, end)
        return range(self._cache.retentions[pool].first_needed(end * size, size), end)

    def _is_loaded(self, request: Request, stretch: _Stretch, otherwise_s: float, turn: EngineTurn) -> bool:
        """Load a stretch if there is memory for it, and it is not had sooner in another way, which takes so long."""
        if not self._has_memory(stretch.sizes) or not self._price.is_worth(self._num_bytes(stretch.sizes), otherwise_s):
            return False
        request.num_loads += 1
        self._load(request, stretch, turn)
        return True

    def _num_bytes(self, sizes: Sequence[int]) -> int:
        return sum(size * num_bytes for size, num_bytes in zip(sizes, self._config.page_bytes, strict=True))

    def _has_memory(self, sizes: Sequence[int]) -> bool:
        """Memory that nobody waits for; what is evicted for it was used longer ago."""
        for pool, size in enumerate(sizes):
            num_loading = sum(len(load.pages[pool]) for load in self._loads.values())
            if size and num_loading and (num_loading + size) * _POOL_SHARE > self._pools[pool].num_pages:
                return False
        return self._budget.fits(sizes, self._sched.running.reserve())

    def _load(self, request: Request, stretch: _Stretch, turn: EngineTurn) -> None:
        owned = self._budget.allocate(stretch.sizes)
        if owned is None:
            return
        end, page_bytes = stretch.end, self._cache.page_size * TOKEN_BYTES
        tokens, keys = bytes(request.tokens[: end * page_bytes]), bytes(request.keys[: end * KEY_BYTES])
        copies: list[SlotCopy] = []
        for pool, (tier, indexes, pages) in enumerate(zip(self.tiers, stretch.ranges, owned, strict=True)):
            slots = tier.use(keys, indexes)
            tier.pin(slots)
            for index, page, slot in zip(indexes, pages, slots, strict=True):
                copies.append(SlotCopy(PoolId(pool), page, slot, key_at(keys, index)))
        self.tiers[_FULL].refresh(keys, stretch.ranges[_FULL].start)
        load = _Load(request, tokens, keys, stretch, owned, tuple(copies))
        number = self._number()
        self._loads[number] = load
        self._coming[load.first_key] = number
        turn.do(LoadPages(number, load.copies))

    def _on_loaded(self, report: PagesCopied) -> None:
        load = self._loads.pop(report.number)
        if self._coming.get(load.first_key) == report.number:
            del self._coming[load.first_key]
        for copy in load.copies:
            self.tiers[copy.pool].unpin((copy.slot,))
        if report.num_good < len(load.copies):
            self.num_bad_slots += 1
            bad = load.copies[report.num_good]
            self.tiers[bad.pool].forget([bad.key])
        self._price.learn(report.num_bytes, report.seconds)
        self._enter_tree(load, report.num_good)
        self._sched.waiting.look_again()

    def _enter_tree(self, load: _Load, num_good: int) -> None:
        """`num_good`: copies that hold what was asked for. Where pages of several pools go together, all or none of
        them are of use."""
        stretch, (full, *tails) = load.stretch, load.pages
        if load.is_void or not num_good or (stretch.has_tails and num_good < len(load.copies)):
            self._budget.free(load.pages)
            return
        good, start = full[:num_good], stretch.ranges[_FULL].start
        self._budget.free([full[num_good:]])
        if self._budget.enter_tree(load.request.namespace, load.tokens, load.keys, start, [good, *tails]):
            sizes = (len(good), *stretch.sizes[1:])
            self.num_loaded += sum(sizes)
            self._bytes_loaded += self._num_bytes(sizes)
            num_tokens = (start + len(good) - stretch.first) * self._cache.page_size
            self._tokens_loaded += num_tokens
            load.request.loaded_len += num_tokens

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    # ------------------------------------------------------------ all of it

    def clear(self) -> None:
        """Forget what the file holds, what is being copied included: none of it is to be had again."""
        for tier in self.tiers:
            tier.clear()
        for load in self._loads.values():
            load.is_void = True

    @property
    def is_copying(self) -> bool:
        """Whether copies are under way."""
        return bool(self._stores or self._loads)

    def owned(self, pool: int) -> list[PageId]:
        """Pages of a pool that loads under way have taken."""
        return [page for load in self._loads.values() for page in load.pages[pool]]

    @property
    def num_busy_slots(self) -> int:
        """Slots that are read or written."""
        return sum(tier.num_pinned + tier.num_writing for tier in self.tiers)

    def check_integrity(self) -> None:
        """Check that the books of the file agree with what is under way. Raises IntegrityError."""
        for tier in self.tiers:
            tier.check_integrity()

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_tier_slots": sum(self._config.num_slots),
            "deltaserve_tier_pages": sum(map(len, self.tiers)),
            "deltaserve_tier_pages_stored_total": self._num_stored,
            "deltaserve_tier_bytes_stored_total": self._bytes_stored,
            "deltaserve_tier_pages_loaded_total": self.num_loaded,
            "deltaserve_tier_bytes_loaded_total": self._bytes_loaded,
            "deltaserve_tier_tokens_loaded_total": self._tokens_loaded,
            "deltaserve_tier_pages_evicted_total": sum(tier.num_evicted for tier in self.tiers),
            "deltaserve_tier_failures_total": self._num_unstored + self.num_bad_slots,
        }


def _keys_of(request: Request, page_size: int) -> bytes:
    """Keys of the pages that its prompt may begin with: its last token is computed in any case."""
    return bytes(request.keys[: (request.num_tokens - 1) // page_size * KEY_BYTES])
