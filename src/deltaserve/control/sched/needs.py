"""How many pages of each pool a request needs: to start, for its next chunk, for its output, at the most."""

from collections.abc import Iterable, Sequence

from deltaserve.control.cache.prefix_cache import Lease
from deltaserve.control.sched.request import Origin, Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.core.ids import PoolId
from deltaserve.core.lifetime import Lifetime, Retention

Needs = tuple[int, ...]
"""Pages of each pool: had all, or none."""


class PageNeeds:
    """Arithmetic over what requests hold and how long pools keep pages; takes nothing."""

    def __init__(self, config: SchedConfig, retentions: Sequence[Retention]) -> None:
        self._page_size, self._chunk_len = config.page_size, config.chunk_len
        self._retentions = tuple(retentions)
        self.pools = tuple(map(PoolId, range(len(self._retentions))))
        self.more_pools = self.pools[1:]
        """All but the first, which keeps everything."""
        self.state_pools = tuple(p for p in self.pools if self._retentions[p].lifetime is Lifetime.STATE)
        self.token_pools = tuple(p for p in self.pools if p not in self.state_pools)
        """All but those of states: pages of tokens."""
        self.one_state: Needs = tuple(int(pool in self.state_pools) for pool in self.pools)
        """A slot of each pool of states: what a request writes."""

    def total(self, needs: Iterable[Needs]) -> Needs:
        none = (0,) * len(self.pools)
        return tuple(map(sum, zip(none, *needs, strict=True)))

    def most(self, num_tokens: int) -> Needs:
        """What a request of so many tokens holds at once: windows and states go on with it."""
        return tuple(kept.most_pages(num_tokens, self._chunk_len, self._page_size) for kept in self._retentions)

    def beside(self, lease: Lease, num_tokens: int) -> Needs:
        """What a request of so many tokens takes besides its lease. Of states one slot, which moves on with it."""
        missing = -(-num_tokens // self._page_size) - lease.num_pages
        leased = (lease.num_pages - lease.first_page(pool) for pool in self.pools)
        most = zip(self.most(num_tokens), leased, self.one_state, strict=True)
        return tuple(state or min(missing, max(0, count - held)) for count, held, state in most)

    def of_next_chunk(self, request: Request, num_drafts: int = 0) -> Needs:
        """What the request's next chunk, and guesses behind it, need and it does not hold."""
        num_tokens = min(request.num_tokens + num_drafts, request.num_computed + self._chunk_len)
        end = -(-num_tokens // self._page_size)
        return tuple(
            int(not request.owned[pool]) if pool in self.state_pools else max(0, end - request.end_page(pool))
            for pool in self.pools
        )

    def of_places(self, request: Request, count: int) -> Needs:
        """What `count` tokens behind its last one need and it does not hold."""
        end = -(-(request.num_tokens + count) // self._page_size)
        return tuple(0 if pool in self.state_pools else max(0, end - request.end_page(pool)) for pool in self.pools)

    def room_behind(self, request: Request) -> int:
        """Tokens behind the request's last one that its pages have room for."""
        end = min(request.end_page(pool) for pool in self.token_pools)
        return end * self._page_size - request.num_tokens

    def _at_start(self, request: Request) -> Needs:
        """What a request without pages will hold when it starts. One whose pages are sent here has of a window what its
        next token sees: each further page, that of this token too, is still to be taken."""
        num_tokens, size = request.num_tokens, self._page_size
        if request.origin is not Origin.FETCHED:
            return self.most(num_tokens)
        end = -(-num_tokens // size)
        return tuple(end - kept.first_needed(num_tokens, size) for kept in self._retentions)

    def of_outputs(self, output_lens: Iterable[int]) -> Needs:
        """What further tokens of so many requests take of the first pool, and nothing of the others: as `of_output` of
        them all, where there is one pool."""
        size = self._page_size
        return (sum([-(-output_len // size) for output_len in output_lens]), *(0 for _ in self.more_pools))

    def of_output(self, request: Request, output_len: int) -> Needs:
        """What `output_len` further tokens take, beyond what the request holds, or will hold once it has started.

        Of a window it needs no more than it holds once that is full, and of states never more than its own slot.
        """
        num_pages = -(-output_len // self._page_size)
        if not self.more_pools:
            return (num_pages,)
        most = self.most(request.num_tokens + output_len)
        held = tuple(map(request.num_held, self.pools)) if request.owned else self._at_start(request)
        more = (max(0, will - has) for will, has in zip(most[1:], held[1:], strict=True))
        return (num_pages, *(0 if state else count for state, count in zip(self.one_state[1:], more, strict=True)))
