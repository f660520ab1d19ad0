"""One sample as the scheduler sees it: tokens, pages, a lease, a row. The same object in every role.

tokens   [0, num_computed)            KV is in its pages
         [num_computed, num_tokens)   known, to be computed
pages    [0, lease.num_pages)         the tree's, shared, read only
         [lease.num_pages, ...)       `owned`, this request's alone
That is pool 0, which keeps everything; of other pools the lease holds a tail or nothing, and `owned` may begin before
or after the lease's end: `owned_first`. Of a STATE pool a request owns one slot at most, which moves on with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from deltaserve.control.cache.prefix_cache import Lease
from deltaserve.control.sched.draft_book import DraftBook, DraftStart
from deltaserve.core.hints import NO_HINTS, KvHints
from deltaserve.core.ids import Namespace, PageId, PoolId, Room, RowId
from deltaserve.core.keys import extend_keys, num_keys
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import CacheUse


class Origin(Enum):
    """Where the KV of a waiting request is to come from."""

    COMPUTED = "computed"
    FETCHED = "fetched"
    """Another worker computes it, and its pages are fetched."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable, owned by one instance. Identity is the object; rooms are keys of its owner's map."""

    room: Room
    namespace: Namespace
    sampling: SamplingParams
    prompt_len: int
    """Tokens of the client's prompt; what follows in `tokens` is output."""
    tokens: bytearray
    keys: bytearray
    """Packed page keys of the leading full pages; grows with `grow_keys`."""
    arrival: float
    deadline: float
    cache: CacheUse = CacheUse.NORMAL
    hints: KvHints = NO_HINTS
    priority: int = 0
    """As `core/priority.py` says; what it comes to is --schedule-policy's."""
    lease: Lease | None = None
    owned: tuple[list[PageId], ...] = ()
    """Per pool: this request's own pages, contiguous from page index `owned_first` on."""
    owned_first: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    """Value of `num_computed` when the steps under way are over; may be less where none is."""
    num_finite: int = 0
    """Tokens whose KV a token was drawn from, here or by its writer: all of it is finite."""
    row: RowId | None = None
    num_retractions: int = 0
    origin: Origin = Origin.COMPUTED
    is_urgent: bool = False
    """Queued before all that are not: it was retracted, or its reader holds memory for it."""
    is_ahead: bool = False
    """Nobody has asked for it when it was started: it makes way for those that are asked for, older or not."""
    num_loads: int = 0
    """How often it waited for pages of its prompt that were loaded from the file under the tree."""
    loaded_len: int = 0
    """Tokens of its prompt that came from there."""
    pulled_len: int = 0
    """Tokens of its prompt that were pulled from its reader before it was computed."""
    matched_len: int = 0
    """Tokens found in the cache when it was last tried."""
    forks: set[int] = field(default_factory=set)
    """Tokens after which others part from it, or have parted from its path: its state there is kept."""
    num_in_state: int = 0
    """Tokens that its own recurrent states have taken in. More than `num_computed` once its output was cut."""
    passing_state: int | None = None
    """Where decoding left its last state in the tree; the next one takes its place."""
    late_to_share: bool = False
    """The tree has pages of its prompt that it computed too: it takes those once no step reads its own."""
    tabled: dict[PoolId, int] = field(default_factory=dict)
    """Pool |-> end of the page indexes that the executor's table holds; absent: none."""
    guesses: DraftBook = field(default_factory=DraftBook)
    hands_over: bool = False
    """Another worker goes on behind its prompt."""
    draft_start: DraftStart | None = None
    """Where a draft head begins, for a prompt that came from elsewhere; None once the executor has heard of it."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def missing_len(self) -> int:
        """Tokens still to be computed or fetched, as far as is known now."""
        leased = self.lease.num_tokens if self.lease else 0
        return self.num_tokens - max(self.num_computed, self.matched_len, leased)

    @property
    def max_len(self) -> int:
        """Tokens when it ends at the latest."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def num_pages(self) -> int:
        """End of the pages held in the pool that keeps everything."""
        leased = self.lease.num_pages if self.lease else 0
        return leased + (len(self.owned[0]) if self.owned else 0)

    def own(self, pages: tuple[list[PageId], ...], firsts: Sequence[int]) -> None:
        """Take pages; `firsts`: page index of the first one, per pool."""
        self.owned, self.owned_first = pages, list(firsts)

    def begin_at(self, num_tokens: int) -> None:
        """KV and states of so many tokens are there."""
        self.num_computed = self.num_in_state = num_tokens

    def grow(self, pages: Sequence[Sequence[PageId]]) -> None:
        """Take further pages behind its own, per pool."""
        for owned, more in zip(self.owned, pages, strict=True):
            owned.extend(more)

    def disown(self) -> tuple[list[PageId], ...]:
        """Give up all own pages; they are the caller's to free."""
        owned, self.owned, self.owned_first = self.owned, (), []
        return owned

    def give_up(self, pool: PoolId, end: int) -> list[PageId]:
        """Take the own pages before page index `end` from it; they are the caller's."""
        if not self.owned:
            return []
        owned, num_pages = self.owned[pool], max(0, end - self.owned_first[pool])
        given_up = owned[:num_pages]
        del owned[:num_pages]
        self.owned_first[pool] += len(given_up)
        return given_up

    def move_state(self, pool: PoolId, index: int) -> None:
        """The own slot will be the state at the end of page index `index`, or of what is computed of that page."""
        self.owned_first[pool] = index

    def own_state(self, pool: PoolId, slot: PageId) -> None:
        """A slot in place of the one that it gave up: what is computed next goes on there."""
        self.owned[pool].append(slot)

    def num_held(self, pool: PoolId) -> int:
        """Pages held, leased and own."""
        leased = self.lease.num_pages - self.lease.first_page(pool) if self.lease else 0
        return leased + (len(self.owned[pool]) if self.owned else 0)

    def end_page(self, pool: PoolId) -> int:
        """End of the page indexes held."""
        if self.owned:
            return self.owned_first[pool] + len(self.owned[pool])
        return self.lease.num_pages if self.lease else 0

    def pages(self, pool: PoolId, first: int, end: int) -> tuple[PageId, ...]:
        """Pages of page indexes [first, end), all of them held."""
        own_from = self.owned_first[pool] if self.owned else self.num_pages
        shared: tuple[PageId, ...] = ()
        if self.lease is not None and first < own_from:
            start = self.lease.first_page(pool)
            shared = self.lease.pages(pool)[first - start : end - start]
        owned = self.owned[pool][max(first - own_from, 0) : max(end - own_from, 0)] if self.owned else []
        return (*shared, *owned)

    def spans(self, pool: PoolId, start: int) -> Iterator[tuple[int, tuple[PageId, ...]]]:
        """(page index of the first, pages) of what is held from page index `start` on: leased, then own."""
        if self.lease is not None:
            first = max(start, self.lease.first_page(pool))
            if first < self.lease.num_pages:
                yield first, self.lease.pages(pool)[first - self.lease.num_pages :]
        if self.owned:
            first = max(start, self.owned_first[pool])
            if pages := self.owned[pool][first - self.owned_first[pool] :]:
                yield first, tuple(pages)

    def append(self, token: int) -> None:
        self.tokens += token.to_bytes(TOKEN_BYTES, "little")  # as pack_u32 does, sooner for one

    def truncate(self, num_tokens: int) -> None:
        """Forget tokens from `num_tokens` on (a stop string ended the output earlier)."""
        del self.tokens[num_tokens * TOKEN_BYTES :]
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_finite = min(self.num_finite, num_tokens)
        self.guesses.drop()

    def ask_no_prompt_logprobs(self) -> None:
        """All that were asked for are told, or the prompt has none."""
        self.sampling = msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    def start_over(self) -> None:
        """What was computed is not its own any more: it is matched, and computed, again."""
        self.num_computed = self.num_planned = self.num_finite = self.num_in_state = 0
        self.late_to_share = False
        self.passing_state = self.draft_start = None
        self.guesses.drop()
        self.forks.clear()

    def grow_keys(self, seed: bytes, page_size: int, num_pages: int) -> None:
        """Make keys cover the first `num_pages` full pages. `seed` is key_0 of the namespace."""
        have = num_keys(self.keys)
        if have >= num_pages:
            return
        last = bytes(self.keys[-16:]) if have else seed
        page_bytes = page_size * TOKEN_BYTES
        self.keys += extend_keys(last, self.tokens[have * page_bytes : num_pages * page_bytes], page_size)
