"""Pages between the tree and the file under it: what enters the tree is copied there, what a prompt lacks comes back.

    in the tree -> pinned, StorePages -> stored: found by its key from then on
    a prompt's turn comes, the tree lacks what the file has -> pages taken, LoadPages -> loaded -> in the tree

Everything is stored at once, and so nothing has to be stored when it is evicted: eviction waits for nobody. A copy
costs much less than computing the page did, and which page will be asked for again is not known at its eviction either.

A request waits for a load as for another one that computes the same page, and is matched again when that is over. Pages
of a load are nobody's until they have been read and checked; then they enter the tree where the prefix before them is
still there, and are freed where it is not. A load that fails costs what the request computes anyway.
"""

from dataclasses import dataclass
from math import inf

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.load_price import LoadPrice
from deltaserve.control.cache.newcomers import Newcomers
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.cache.tier import Tier
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.scheduler import Scheduler
from deltaserve.control.transfer.commands import LoadPages, PagesLoaded, PagesStored, StorePages
from deltaserve.core.ids import Namespace, PageId
from deltaserve.core.keys import KEY_BYTES, key_at
from deltaserve.core.tokens import TOKEN_BYTES

_STORED_AT_ONCE = 32
"""Most pages of one StorePages."""
_STORES = 2
"""So many of them are under way at most."""
_STORED_SHARE = 32
"""A StorePages takes at most one page in so many: what it pins cannot be used anew before it is through."""
_SENT_BYTES_PER_S = 3e8
"""What another worker has to send comes at this rate, as far as is known here."""
_LOADS_OF_REQUEST = 3
"""A request waits for so many loads at most. What was loaded may be evicted before its turn comes."""
_POOL_SHARE = 2
"""Several loads under way take at most one page in so many; a lone one takes what its request needs anyway."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The file under the tree of one worker."""

    num_slots: int
    page_bytes: int
    """What a page takes, on all ranks together."""


@dataclass(frozen=True, slots=True)
class _Store:
    pages: tuple[PageId, ...]
    slots: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Load:
    """Pages [first, first + len(pages)) of a prompt on their way back."""

    namespace: Namespace
    tokens: bytes
    keys: bytes
    """Tokens and keys up to the last of them."""
    first: int
    pages: list[PageId]
    slots: tuple[int, ...]
    is_void: bool = False
    """What the file held is worthless, as is known by now."""

    @property
    def first_key(self) -> bytes:
        return key_at(self.keys, self.first)


class Tiering:
    """All that is copied between a worker's first pool and its file. Of models that keep every token in one pool."""

    def __init__(
        self, config: TierConfig, pool: PagePool, cache: PrefixCache, budget: Budget, sched: Scheduler
    ) -> None:
        self.tier = Tier(config.num_slots)
        self._config = config
        self._pool = pool
        self._cache = cache
        self._budget = budget
        self._sched = sched
        self._price = LoadPrice()
        self._batch_len = max(1, min(_STORED_AT_ONCE, pool.num_pages // _STORED_SHARE))
        self._newcomers = Newcomers(self.tier, self.clear)
        cache.tell(self._newcomers)
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._coming: dict[bytes, int] = {}
        """First key of a load |-> its number."""
        self._next_number = 1
        self.num_loaded = 0
        """Pages that came back."""
        self.num_bad_slots = 0
        """Loads that met a slot which did not hold what it should."""
        self._num_stored = self._num_unstored = 0
        self._bytes_stored = self._bytes_loaded = 0

    # ------------------------------------------------------------ to the file

    def store_some(self, turn: EngineTurn) -> None:
        """Have pages copied that have entered the tree, the oldest first, as many as may be under way."""
        while len(self._newcomers) and len(self._stores) < _STORES:
            batch: list[tuple[PageId, int, bytes]] = []
            for key, page in self._newcomers.take(self._batch_len).items():
                if key in self.tier:
                    self.tier.touch(key)
                elif (slot := self.tier.begin(key)) is not None:
                    batch.append((page, slot, key))
            if batch:
                pages, slots, keys = zip(*batch, strict=True)
                self._pool.pin(pages)
                number = self._number()
                self._stores[number] = _Store(pages, slots)
                turn.do(StorePages(number, pages, slots, keys))

    def on_stored(self, report: PagesStored) -> None:
        store = self._stores.pop(report.number)
        self._pool.unpin(store.pages)
        for slot in store.slots:
            (self.tier.stored if report.problem is None else self.tier.failed)(slot)
        if report.problem is None:
            self._num_stored += len(store.slots)
            self._bytes_stored += report.num_bytes
        else:
            self._num_unstored += 1

    # ------------------------------------------------------------ from the file

    def awaits(self, request: Request, num_cached: int, tokens_per_s: float | None, turn: EngineTurn) -> bool:
        """Whether the request, of which the tree has `num_cached` pages, had better wait for pages of the file.

        They are on their way then, unless memory for them was promised and not to be had: in the next turn it is.
        `tokens_per_s`: at which prompts are computed here, 0 if it is not known; None: another worker sends them.
        """
        keys = request.keys[: (request.num_tokens - 1) // self._cache.page_size * KEY_BYTES]
        if key_at(keys, num_cached) in self._coming:
            return True
        if request.num_loads == _LOADS_OF_REQUEST or self._sched.waiting.blocked_need:
            return False
        slots = self.tier.find(keys, num_cached)
        if not slots or not self._has_memory(len(slots)):
            return False
        if not self._price.is_worth(len(slots) * self._config.page_bytes, self._otherwise_s(len(slots), tokens_per_s)):
            return False
        request.num_loads += 1
        self._load(request, num_cached, slots, turn)
        return True

    def _otherwise_s(self, num_pages: int, tokens_per_s: float | None) -> float:
        if tokens_per_s is None:
            return num_pages * self._config.page_bytes / _SENT_BYTES_PER_S
        return num_pages * self._cache.page_size / tokens_per_s if tokens_per_s else inf

    def _has_memory(self, num_pages: int) -> bool:
        """Memory that nobody waits for; what is evicted for it was used longer ago."""
        num_loading = sum(len(load.pages) for load in self._loads.values())
        if num_loading and (num_loading + num_pages) * _POOL_SHARE > self._pool.num_pages:
            return False
        return self._budget.fits((num_pages,), self._sched.running.reserve())

    def _load(self, request: Request, first: int, slots: tuple[int, ...], turn: EngineTurn) -> None:
        owned = self._budget.allocate((len(slots),))
        if owned is None:
            return
        end, page_bytes = first + len(slots), self._cache.page_size * TOKEN_BYTES
        tokens, keys = bytes(request.tokens[: end * page_bytes]), bytes(request.keys[: end * KEY_BYTES])
        load = _Load(request.namespace, tokens, keys, first, owned[0], slots)
        number = self._number()
        self.tier.pin(slots)
        self._loads[number] = load
        self._coming[load.first_key] = number
        wanted = tuple(key_at(keys, index) for index in range(first, end))
        turn.do(LoadPages(number, tuple(load.pages), slots, wanted))

    def on_loaded(self, report: PagesLoaded) -> None:
        load = self._loads.pop(report.number)
        if self._coming.get(load.first_key) == report.number:
            del self._coming[load.first_key]
        self.tier.unpin(load.slots)
        num_good = 0 if load.is_void else min(report.num_good, len(load.pages))
        if report.num_good < len(load.pages):
            self.num_bad_slots += 1
            self.tier.forget([key_at(load.keys, load.first + report.num_good)])
        self._price.learn(report.num_bytes, report.seconds)
        self._budget.free([load.pages[num_good:]])
        if num_good and self._budget.enter_tree(
            load.namespace, load.tokens, load.keys, load.first, [load.pages[:num_good]]
        ):
            self.num_loaded += num_good
            self._bytes_loaded += num_good * self._config.page_bytes
        self._sched.waiting.look_again()

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    # ------------------------------------------------------------ all of it

    def clear(self) -> None:
        """Forget what the file holds, what is being copied included: none of it is to be had again."""
        self.tier.clear()
        for load in self._loads.values():
            load.is_void = True

    @property
    def is_copying(self) -> bool:
        """Whether copies are under way."""
        return bool(self._stores or self._loads)

    def owned(self) -> list[PageId]:
        """Pages of loads under way."""
        return [page for load in self._loads.values() for page in load.pages]

    def check_integrity(self) -> None:
        """Check that the books of the file agree with what is under way. Raises IntegrityError."""
        self.tier.check_integrity()

    def metrics(self) -> dict[str, float]:
        return {
            "deltaserve_tier_slots": self.tier.num_slots,
            "deltaserve_tier_pages": len(self.tier),
            "deltaserve_tier_pages_stored_total": self._num_stored,
            "deltaserve_tier_bytes_stored_total": self._bytes_stored,
            "deltaserve_tier_pages_loaded_total": self.num_loaded,
            "deltaserve_tier_bytes_loaded_total": self._bytes_loaded,
            "deltaserve_tier_tokens_loaded_total": self.num_loaded * self._cache.page_size,
            "deltaserve_tier_pages_evicted_total": self.tier.num_evicted,
            "deltaserve_tier_failures_total": self._num_unstored + self.num_bad_slots,
        }
