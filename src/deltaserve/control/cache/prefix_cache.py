"""PrefixCache: match, lease, insert, release, evict, poison. The one holder of CACHED pages.

    page indexes of a path   [0 ......... lease.num_pages)[ ...... adopted ...... )[ ...... new ...... )
    before insert             leased, in the tree          ours OWNED, equal in tree  ours OWNED
    after insert              leased, in the tree          ours freed, equal leased   in the tree, leased

That is the picture of a FULL pool: its pages are the path, and without one there is no node. WINDOW pages and states
may be absent above and in between (control/cache/tails.py); each pool has its own locks, order of eviction and counts.
A lease locks the FULL pages from its node to the root, and of each other pool the tail that continuing at its end
needs.
"""

from collections.abc import Iterable, Iterator, Sequence

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.block_log import BlockChange, BlockLog, BlocksForgotten, BlocksStored
from deltaserve.control.cache.eviction import ORDERS, HintedOrder, KvEviction, note_reuse, note_shared
from deltaserve.control.cache.integrity import TreeAccounts, check_accounts
from deltaserve.control.cache.lease import Insertion, Lease, Match
from deltaserve.control.cache.newcomers import Newcomers
from deltaserve.control.cache.pages import PageEvent
from deltaserve.control.cache.radix import Node, Packed, Pages, RadixTree
from deltaserve.control.cache.retention_hints import KeptNodes
from deltaserve.control.cache.tails import StateEviction, TailPool
from deltaserve.control.cache.tree_changes import EventLog
from deltaserve.control.cache.tree_shape import shape_of
from deltaserve.core.errors import StateError
from deltaserve.core.ids import Namespace, PageId, Room
from deltaserve.core.keys import KEY_BYTES, key_at, num_keys, unpack_keys
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.tokens import TOKEN_BYTES, token_len
from deltaserve.core.wire.messages import Events, TreeShape

__all__ = ["Insertion", "Lease", "Match", "PrefixCache", "StateEviction"]


_FULL = 0
"""Number of the FULL pool."""


class PrefixCache:
    """Radix tree over the pages of `pools`. One per engine; every method is quick and none blocks."""

    def __init__(
        self,
        page_size: int,
        pools: tuple[PagePool, ...],
        retentions: tuple[Retention, ...] = (KEEP_ALL,),
        state_eviction: StateEviction = StateEviction.RECENCY,
        blocks: BlockLog | None = None,
        eviction: KvEviction = KvEviction.LRU,
        events: EventLog | None = None,
    ) -> None:
        """`blocks`: writes down what enters and leaves the tree, for others; None: nobody asks. `events`: the same for
        routers; another one than this tree's alone where a file holds pages, too."""
        self.page_size = page_size
        self.pools = pools
        self.retentions = retentions
        is_full = [retention.lifetime is Lifetime.FULL for retention in retentions]
        if is_full != [True] + [False] * (len(pools) - 1):
            raise ValueError("each pool needs a retention, and the first alone must be FULL: its pages are the path")
        self._page_bytes = page_size * TOKEN_BYTES
        self._tails = tuple(
            TailPool(index, pool, retention, page_size, state_eviction)
            for index, (pool, retention) in enumerate(zip(pools, retentions, strict=True))
            if index != _FULL
        )
        self._tail_of = {tail.index: tail for tail in self._tails}
        self._from_start = (0,) * len(pools)
        self._tree = RadixTree(page_size, len(pools))
        self._order = HintedOrder(ORDERS[eviction]())
        self._kept = KeptNodes(pools[_FULL].num_pages)
        self._now = 0.0
        self._events = EventLog() if events is None else events
        self._blocks = blocks
        self._newcomers: Newcomers | None = None
        """Takes note of pages to be copied elsewhere; None: nobody copies."""
        self._leases: set[Lease] = set()
        self._num_evictable = 0  # pages of unlocked nodes in the FULL pool
        self._num_protected = 0  # pages of locked nodes in the FULL pool
        self._version = 0
        self.num_retired = 0
        """FULL pages that `retire` brought forward."""
        self.num_flushed = [0] * len(pools)
        """Per pool: pages that `clear` dropped; `evict` did so with the others that events EVICT have moved."""

    @property
    def version(self) -> int:
        """Changes whenever a match could, or `Lease.path` must be read again."""
        return self._version

    def tell(self, newcomers: Newcomers) -> None:
        """Have `newcomers` told of pages that enter and leave the tree from now on."""
        self._newcomers = newcomers
        for tail in self._tails:
            tail.tell(newcomers)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def evictable_pages(self, pool: int) -> int:
        """Pages `evict` can take. Those still pinned are counted, but free nothing until they are unpinned."""
        tail = self._tail_of.get(pool)
        return self._num_evictable if tail is None else tail.num_evictable

    def protected_pages(self, pool: int) -> int:
        """Pages in the tree that a lease keeps there."""
        tail = self._tail_of.get(pool)
        return self._num_protected if tail is None else tail.num_held - tail.num_evictable

    # ------------------------------------------------------------ match and lease

    def match(self, namespace: Namespace, tokens: Packed, keys: Packed, max_len: int | None = None) -> Match:
        """Longest cached prefix in whole pages, of at most `max_len` tokens; makes it the most recently used.

        `tokens`: packed ids from position 0; `keys`: packed page keys of at least as many pages as may match.
        """
        limit = min(len(tokens) // self._page_bytes, len(keys) // KEY_BYTES)
        if max_len is not None:
            limit = min(limit, max_len // self.page_size)
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match(namespace, 0, 0, 0, self._version, None, self._tree)
        node, reach = self._tree.descend(root, tokens, keys, limit)
        if not reach:
            return Match(namespace, 0, 0, 0, self._version, None, self._tree)
        self._order.touch_to(node, reach)
        usable = reach
        if self._tails:
            usable = self._usable(node, reach)
            for tail in self._tails:
                tail.touch(_covering(node, usable), usable)
        size = self.page_size
        return Match(namespace, usable * size, usable, reach * size, self._version, node, self._tree)

    def holds(self, match: Match, pool: int, end: int) -> bool:
        """Whether a pool has all that continuing at page index `end` needs, which the match reaches."""
        self._check_current(match)
        tail = self._tail_of.get(pool)
        return tail is None or match.node is None or tail.shorten(_covering(match.node, end), end) == end

    def lease(self, match: Match) -> Lease:
        """Lock the usable prefix and all that continuing there needs. StateError when the tree changed since."""
        self._check_current(match)
        if match.node is None or not match.num_pages:
            return self.empty_lease(match.namespace)
        node = self._cut(match.node, match.num_pages)
        self._note_branching(match, node)
        return self._lock_again(node, None, self._firsts(node, match.num_tokens))

    def lease_kv(self, match: Match, num_tokens: int) -> Lease:
        """Lock the FULL pages as far as they reach, for a request whose prompt of `num_tokens` is computed elsewhere.

        Of a window it locks what continuing at `num_tokens` needs of this prefix, or nothing if any of it is gone: then
        that pool's part is to be handed over whole. Of states it locks none: whoever computes the prompt's last token
        has the state at its end, so the prefix reaches as far as its FULL pages do.
        """
        self._check_current(match)
        if match.node is None:
            return self.empty_lease(match.namespace)
        node = self._cut(match.node, match.reach // self.page_size)
        self._note_branching(match, node)
        return self._lock_again(node, None, self._firsts_without_states(node, num_tokens))

    def empty_lease(self, namespace: Namespace) -> Lease:
        """Lease of no pages, for a request without a hit: it too inserts into its lease."""
        return self._lock_new(self._tree.root(namespace), None, self._from_start)

    def lengthen(self, lease: Lease, tokens: Packed, keys: Packed) -> Lease:
        """`lease`, or if the tree has grown below its end, a longer one in its place as `lease_kv` makes it.

        `tokens` and `keys` are those of the whole prompt; only what lies below the lease's end is compared.
        """
        self._check_live(lease)
        self._check_path(lease, lease.namespace, tokens, keys, lease.num_pages)
        node, reach = self._tree.descend(lease._node, tokens, keys, self._num_full_pages(tokens, keys))
        if reach == lease.num_pages:
            return lease
        node = self._cut(node, reach)
        note_shared(node)
        longer = self._lock_again(node, lease._node, self._firsts_without_states(node, token_len(tokens)))
        self._end(lease)
        return longer

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Give up the window pages, or the state, that continuing at `num_tokens` no longer needs."""
        for tail in self._tails:
            self._give_up(lease, tail, self.retentions[tail.index].first_needed(num_tokens, self.page_size))

    def release(self, lease: Lease) -> None:
        """Unlock a path: what no other lease locks becomes evictable, most recently used. A second time raises."""
        self._check_live(lease)
        self._end(lease)
        node = lease._node
        while node.parent is not None:
            parent = node.parent
            node.locks -= 1
            if not node.locks:
                self._num_protected -= node.num_pages
                self._num_evictable += node.num_pages
                if node.severed:
                    self._drop_severed(node)
                else:
                    self._order.add(node)
            node = parent
        node.locks -= 1
        self._tree.forget_if_empty(node)

    def retire(self, lease: Lease) -> int:
        """`release` a path that nobody comes back to: what no other path shares of it is evicted before all else, until
        it is matched again. Returns its FULL pages; none where others go on from its end, or lease all of it."""
        leaf = lease._node
        self.release(lease)
        branch = () if leaf.severed else self._order.retire(leaf)
        for node in branch:
            self._kept.forget(node)
            for tail in self._tails:
                tail.retire(node)
        num_pages = sum(node.num_pages for node in branch)
        self.num_retired += num_pages
        return num_pages

    def retain(self, lease: Lease, seconds: float) -> int:
        """Keep the leased path for so long: it is evicted behind all that nobody keeps. Returns the FULL pages that are
        kept of it, from its beginning on: no more than its tenant's share. What that keeps elsewhere makes way."""
        self._check_live(lease)
        num_kept, until = 0, self._now + seconds
        path = () if lease._node.severed else tuple(_path(lease._node)[1:])
        for node in path:
            room = node.num_pages if node.kept else self._room_for(node, path)
            if not room:
                break
            part = node if room >= node.num_pages else self._split(node, node.start + room)
            self._kept.keep(part, until)
            num_kept = part.end
            if part is not node:
                break
        return num_kept

    def _room_for(self, node: Node, path: Sequence[Node]) -> int:
        """Pages that may be kept of `node`, once what its tenant keeps off `path` and ends first has made way."""
        namespace = node.namespace
        missing = node.num_pages - self._kept.room(namespace)
        others = self._kept.first_to_end(namespace, missing, frozenset(path)) if missing > 0 else ()
        excess = sum(other.num_pages for other in others) - missing
        if others and excess > 0:
            self._order.touch_path(self._split(others[-1], others[-1].start + excess))
        for other in others:
            self._kept.forget(other)
            self._order.keep_no_longer(other)
        return self._kept.room(namespace)

    def may_retain(self, namespace: Namespace) -> int:
        """Pages of a path, from its beginning on, that `retain` may keep."""
        return self._kept.most(namespace)

    @property
    def num_retained(self) -> int:
        """FULL pages that are kept for a while."""
        return self._kept.num_pages

    def tell_time(self, now: float) -> None:
        """What was to be kept until now is as all else is."""
        self._now = now
        for node in self._kept.due(now):
            self._order.keep_no_longer(node)

    # ------------------------------------------------------------ insert

    def insert(self, lease: Lease, namespace: Namespace, tokens: Packed, keys: Packed, pages: Pages) -> Insertion:
        """Hand over OWNED pages that all end at one page index, the new end of the path; ends `lease`.

        A FULL pool's are those of [lease.num_pages, end); a WINDOW pool's the last ones before `end`, as many as there
        are, also before the lease's end; a STATE pool's none, or the one slot of the state at `end`. `tokens` and
        `keys` are those of the whole path from position 0. Where the tree has a page already it is adopted and ours
        is freed. The new lease keeps what continuing at `end` needs of what the old one held and of what was handed
        over. Raises ValueError or StateError, and then nothing has changed.
        """
        self._check_live(lease)
        first = lease.num_pages
        limit = first + self._num_handed_over(lease, pages)
        self._check_path(lease, namespace, tokens, keys, limit)
        for pool, handed_over in zip(self.pools, pages, strict=True):
            pool.require(handed_over, PageEvent.CACHE)

        node, end = self._tree.descend(lease._node, tokens, keys, limit)
        if end < node.end:
            node = self._split(node, end)
        if node.children if end < limit else end > first and node.locks:
            note_shared(node)
        self.pools[_FULL].free(pages[_FULL][: end - first])
        if end < limit:
            size = self._page_bytes
            path_tail = bytes(tokens[end * size : limit * size]), bytes(keys[end * KEY_BYTES : limit * KEY_BYTES])
            node = self._store(node, lease, *path_tail, pages)
        for tail in self._tails:
            handed_over = pages[tail.index]
            if tail.fill(node, end, handed_over[: max(0, len(handed_over) - (limit - end))]):
                self._version += 1
        firsts = self._firsts_after(lease, limit, pages) if self._tails else self._from_start
        longer = self._lock_new(node, lease._node, firsts)
        self._end(lease)
        return Insertion(longer, end - first)

    def poison(self, namespace: Namespace, tokens: Packed, keys: Packed, first_page: int = 0) -> None:
        """Make the path of `tokens` from `first_page` on unmatchable, with all that was computed after it.

        What no lease holds is evicted at once, the rest when its last lease ends.
        """
        if self._newcomers is not None:
            self._newcomers.poisoned()
        root = self._tree.roots.get(namespace)
        if root is None:
            return
        node, end = self._tree.descend(root, tokens, keys, self._num_full_pages(tokens, keys))
        if end <= first_page:
            return
        top = _covering(node, first_page + 1)
        if top.start < first_page:
            self._order.touch_path(self._split(top, first_page))
        self._tree.sever(top)
        self._version += 1
        for node in reversed(list(self._tree.below(top))):
            self._note_gone(node.keys)
            self._kept.forget(node)
            if not node.locks:
                self._order.remove(node)
                self._drop_severed(node)

    # ------------------------------------------------------------ evict

    def forget_states(self, lease: Lease, num_tokens: int) -> None:
        """Evict the states at `num_tokens` of a leased path, unless others have gone on from there, or lease them."""
        self._check_live(lease)
        end = num_tokens // self.page_size
        node = _covering(lease._node, end)
        if node.end != end or node.parent is None or node.locks > 1 or len(node.children) > (node is not lease._node):
            return
        for tail in self._tails:
            if tail.lifetime is Lifetime.STATE and tail.forget(node):
                self._version += 1

    def evict(self, needs: Sequence[int]) -> tuple[int, ...]:
        """Free at least `needs[pool]` pages of each pool, in the order of the policy.

        FULL pages go leaf by leaf, tail before head, with all that other pools hold there; windows and states go
        alone. What is leased stays. Returns the pages that became allocatable, per pool: fewer than asked when all
        that is left is leased or pinned, more in one pool when another needed more.
        """
        if len(needs) != len(self.pools):
            raise ValueError(f"{len(needs)} needs for {len(self.pools)} pools")
        before = [pool.num_free for pool in self.pools]
        goals = [start + need for start, need in zip(before, needs, strict=True)]
        while (missing := goals[_FULL] - self.pools[_FULL].num_free) > 0:
            if not self._drop_oldest(missing):
                break
        for tail in self._tails:
            while (missing := goals[tail.index] - tail.pool.num_free) > 0:
                if not tail.evict(missing):
                    break
                self._version += 1
        return tuple(pool.num_free - start for pool, start in zip(self.pools, before, strict=True))

    def clear(self) -> tuple[int, ...]:
        """Drop everything no lease protects. Returns the pages that became allocatable, per pool."""
        before = [pool.num_free for pool in self.pools]
        num_evicted = [pool.moves[PageEvent.EVICT] for pool in self.pools]
        self._drop_oldest(self._num_evictable)
        for tail in self._tails:
            if tail.evict(tail.num_evictable):
                self._version += 1
        for index, pool in enumerate(self.pools):
            self.num_flushed[index] += pool.moves[PageEvent.EVICT] - num_evicted[index]
        return tuple(pool.num_free - start for pool, start in zip(self.pools, before, strict=True))

    def drain_events(self) -> Events:
        """What entered and left the tree since the last call: FULL pages, since they say how far a match can reach."""
        return self._events.drain()

    def snapshot(self) -> Events:
        """All keys in the tree now, for a receiver that missed events; the next drain continues it."""
        stored = b"".join((*(node.keys for node in self._tree.nodes()), self._events.beside_tree()))
        return Events(first=self._events.next_event, stored=stored, evicted=b"", snapshot=True)

    def drain_blocks(self) -> tuple[BlockChange, ...]:
        """What entered and left the tree since the last call, with token ids; nothing where nobody asks. Of more
        changes than are kept only what there is now is told."""
        if self._blocks is None:
            return ()
        taken = self._blocks.take()
        return (BlocksForgotten(), *self._all_blocks()) if taken is None else taken

    def _all_blocks(self) -> Iterator[BlocksStored]:
        for node in self._tree.nodes():
            if node.parent is not None:
                yield BlocksStored(node.namespace, node.parent.keys[-KEY_BYTES:], node.keys, node.tokens)

    def states(self, pool: int) -> Iterator[tuple[Namespace, bytes, PageId]]:
        """(namespace, packed tokens that the state has taken in, its slot) of every state that a match can reach."""
        for node in self._tree.nodes():
            for slot in node.pages[pool]:
                yield node.namespace, b"".join(step.tokens for step in _path(node)), slot

    def shape(self, holders: Iterable[tuple[Lease, Room]], max_nodes: int) -> TreeShape:
        """What the tree holds, for people: its FULL pages, and where the leases of which requests end."""
        num_pages = self._num_evictable + self._num_protected
        return shape_of(self._tree, num_pages, ((lease._node, room) for lease, room in holders), max_nodes)

    def check_integrity(self) -> None:
        """Recompute locks, counts, order and page states, pools included. Raises IntegrityError."""
        leased = [(lease._node, lease._firsts) for lease in self._leases]
        self._kept.check_integrity([node for node in self._tree.nodes() if node.parent is not None])
        if self._newcomers is not None:
            for pool in range(len(self.pools)):
                self._newcomers.check_integrity(pool, self._pages_by_key(pool))
        counts = self._num_evictable, self._num_protected
        check_accounts(TreeAccounts(self._tree, self._order, self.pools, self._tails, leased, *counts))

    def _pages_by_key(self, pool: int) -> dict[bytes, PageId]:
        """All pages of a pool that a match can reach."""
        return {
            key: page
            for node in self._tree.nodes()
            for key, page in zip(
                unpack_keys(node.keys_of(node.held_from(pool), node.end)), node.pages[pool], strict=True
            )
        }

    # ------------------------------------------------------------ what calls may hand in

    def _num_full_pages(self, tokens: Packed, keys: Packed) -> int:
        return min(len(tokens) // self._page_bytes, num_keys(keys))

    def _num_handed_over(self, lease: Lease, pages: Pages) -> int:
        """New page indexes. Raises ValueError unless each pool's part may be what it should."""
        counts = [len(handed_over) for handed_over in pages]
        if len(counts) != len(self.pools):
            raise ValueError(f"pages of {len(counts)} pools for {len(self.pools)}")
        end = lease.num_pages + counts[_FULL]
        for tail in self._tails:
            if counts[tail.index] > (min(end, 1) if tail.lifetime is Lifetime.STATE else end):
                raise ValueError(f"{counts[tail.index]} pages of pool {tail.index} before page index {end}")
        return counts[_FULL]

    def _check_path(self, lease: Lease, namespace: Namespace, tokens: Packed, keys: Packed, limit: int) -> None:
        """Chained keys: if the last leased page's key agrees, so do all the tokens before it."""
        if len(tokens) < limit * self._page_bytes or num_keys(keys) < limit:
            raise ValueError(f"pages up to index {limit} need as many full pages of tokens and keys")
        if namespace != lease.namespace:
            raise ValueError("the lease is of another namespace")
        if lease.num_pages and not lease._node.keys.endswith(key_at(keys, lease.num_pages - 1)):
            raise ValueError("the lease is of another token path")

    def _check_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StateError("a lease is ended exactly once, by the cache that made it")

    def _check_current(self, match: Match) -> None:
        if match.tree is not self._tree or match.version != self._version:
            raise StateError("the tree has changed since this match")

    # ------------------------------------------------------------ paths

    def _usable(self, node: Node, reach: int) -> int:
        """Largest page index <= reach at which every pool could continue. Each round only shortens, so it ends."""
        end = reach
        while end:
            node = _covering(node, end)
            shorter = min(tail.shorten(node, end) for tail in self._tails)
            if shorter == end:
                break
            end = shorter
        return end

    def _cut(self, node: Node, end: int) -> Node:
        """The node of `node`'s path that ends at page index `end`, split off if need be. The caller locks it next."""
        node = _covering(node, end)
        return self._split(node, end) if end < node.end else node

    def _split(self, node: Node, index: int) -> Node:
        """Upper part of `node`, cut at `index`. The caller locks or touches it next: its place in the order is open."""
        upper = self._tree.split(node, index)
        upper.locks = node.locks
        self._kept.split(upper, node)
        self._order.resized(node)
        if not upper.locks:
            self._order.add_upper(upper)
        for tail in self._tails:
            tail.split(upper, node)
        self._version += 1
        return upper

    # ------------------------------------------------------------ locks

    def _firsts(self, node: Node, num_tokens: int) -> tuple[int, ...]:
        """Per pool: first page index that a lease of `node` keeps for continuing at `num_tokens`."""
        if not self._tails:
            return self._from_start
        firsts = list(self._from_start)
        for tail in self._tails:
            firsts[tail.index] = tail.first_held(node, num_tokens)
        return tuple(firsts)

    def _firsts_without_states(self, node: Node, num_tokens: int) -> tuple[int, ...]:
        firsts = list(self._firsts(node, num_tokens))
        for tail in self._tails:
            if tail.lifetime is Lifetime.STATE:
                firsts[tail.index] = node.end
        return tuple(firsts)

    def _firsts_after(self, lease: Lease, end: int, pages: Pages) -> tuple[int, ...]:
        """First page indexes to hold after an insert: of what `lease` held and what was handed over, the part that
        `end` needs."""
        firsts = list(self._from_start)
        for tail in self._tails:
            held, handed_over = lease.first_page(tail.index), end - len(pages[tail.index])
            if handed_over <= lease.num_pages:  # without a gap between the two
                handed_over = min(held, handed_over)
            firsts[tail.index] = max(tail.first_needed(end), handed_over)
        return tuple(firsts)

    def _give_up(self, lease: Lease, tail: TailPool, first: int) -> None:
        """Let a lease hold a pool's pages from page index `first` on only."""
        self._check_live(lease)
        held = lease.first_page(tail.index)
        first = min(first, lease.num_pages)
        if first > held:
            tail.lock(lease._node, first)
            tail.unlock(lease._node, held)
            lease._firsts = (*lease._firsts[: tail.index], first, *lease._firsts[tail.index + 1 :])

    def _lock_again(self, node: Node, above: Node | None, firsts: tuple[int, ...]) -> Lease:
        """`_lock_new` for another request than the one that computed the path. Its nodes have left the order, which
        may ask for `reused` when they come back."""
        lease = self._lock_new(node, above, firsts)
        note_reuse(node)
        return lease

    def _lock_new(self, node: Node, above: Node | None, firsts: tuple[int, ...]) -> Lease:
        """Lock `node` and its ancestors up to, not including, `above`, whose lock passes over to the new lease."""
        step: Node | None = node
        while step is not above and step is not None:
            if not step.locks and step.parent is not None:
                self._order.remove(step)
                self._num_evictable -= step.num_pages
                self._num_protected += step.num_pages
            step.locks += 1
            step = step.parent
        for tail in self._tails:
            tail.lock(node, firsts[tail.index])
        lease = Lease(node, self.page_size, firsts)
        self._leases.add(lease)
        return lease

    def _end(self, lease: Lease) -> None:
        self._leases.remove(lease)
        for tail in self._tails:
            if lease._firsts[tail.index] < lease.num_pages:  # its node may have grown since
                tail.unlock(lease._node, lease._firsts[tail.index])
        lease._live = False

    def _note_branching(self, match: Match, node: Node) -> None:
        """A request leases the path to `node`. One that goes on where a path ended has it for itself, as the next turn
        of a conversation has; of a path that goes on in another way as well, that part is shared."""
        deepest = match.node
        if deepest is not None and (deepest.children or match.reach < deepest.end * self.page_size):
            note_shared(node)

    # ------------------------------------------------------------ pages come and go

    def _store(self, node: Node, lease: Lease, tokens: bytes, keys: bytes, pages: Pages) -> Node:
        """Put the last OWNED pages below the end of `node`, which the path of `lease` has reached.

        The caller locks it next.
        """
        num_new, parent = num_keys(keys), node.keys[-KEY_BYTES:]
        new_pages = tuple(handed_over[-num_new:] for handed_over in pages)
        for pool, new in zip(self.pools, new_pages, strict=True):
            pool.cache(new)
        self._version += 1
        if self._may_grow(node, lease, num_new, new_pages):
            self._tree.extend(node, tokens, keys, new_pages)
        else:
            node = self._tree.add(node, tokens, keys, new_pages)
            self._order.add(node)
        if not node.severed:
            self._events.stored(keys)
            if self._newcomers is not None:
                self._newcomers.stored(_FULL, keys, new_pages[_FULL])
            if self._blocks is not None:
                self._blocks.stored(BlocksStored(node.namespace, parent, keys, tokens))
        if node.locks:
            self._num_protected += num_new
        else:
            self._num_evictable += num_new
        for tail in self._tails:
            tail.stored(node, len(new_pages[tail.index]))
        return node

    def _note_gone(self, keys: bytes) -> None:
        gone = self._events.evicted(keys)
        if self._newcomers is not None:
            self._newcomers.path_gone(keys)
        if self._blocks is not None and gone:
            self._blocks.removed(gone)

    def _may_grow(self, node: Node, lease: Lease, num_new: int, new_pages: Pages) -> bool:
        """Whether `node` is a lone leaf that no other lease ends at, and would stay one that a node may be. One that is
        shared does not grow by what is not."""
        num_others = node.locks - (node is lease._node)
        if node.parent is None or node.children or num_others or node.shared or node.kept:
            return False
        return all(tail.may_extend(node, num_new, len(new_pages[tail.index])) for tail in self._tails)

    def _drop_oldest(self, num_pages: int) -> int:
        """Evict `num_pages` FULL pages, or all evictable ones; returns how many. One batch per pool, not per leaf."""
        dropped: tuple[list[PageId], ...] = tuple([] for _ in self.pools)
        missing = num_pages
        while missing and (leaf := self._order.oldest()) is not None:
            num_dropped = min(leaf.num_pages, missing)
            missing -= num_dropped
            for batch, pages in zip(dropped, leaf.pages, strict=True):
                batch += pages[-num_dropped:]
            self._drop_tail(leaf, num_dropped)
        for pool, batch in zip(self.pools, dropped, strict=True):
            pool.evict(batch)
        if missing < num_pages:
            self._version += 1
        return num_pages - missing

    def _drop_tail(self, leaf: Node, num_pages: int) -> None:
        """Cut `num_pages` page indexes off an unlocked leaf, or all of it. Its pages are the caller's."""
        kept = leaf.num_pages - num_pages
        held = leaf.pages
        self._note_gone(leaf.keys[kept * KEY_BYTES :])
        self._num_evictable -= num_pages
        if kept:
            self._tree.trim(leaf, leaf.start + kept)
            self._kept.resized(leaf)
            self._order.resized(leaf)
        else:
            self._order.remove(leaf)
            self._remove(leaf)
        for tail in self._tails:
            tail.lost(leaf, len(held[tail.index]) - len(leaf.pages[tail.index]))

    def _drop_severed(self, node: Node) -> None:
        """Evict an unlocked node that no path leads to. None is below it: those were unlocked before."""
        held = node.pages
        for pool, pages in zip(self.pools, held, strict=True):
            pool.evict(pages)
        self._num_evictable -= node.num_pages
        self._remove(node)
        for tail in self._tails:
            tail.lost(node, len(held[tail.index]))

    def _remove(self, leaf: Node) -> None:
        self._kept.forget(leaf)
        parent = self._tree.remove(leaf)
        leaf.pages = ((),) * len(self.pools)
        if parent.parent is None:
            self._tree.forget_if_empty(parent)


def _covering(node: Node, end: int) -> Node:
    """The node on the path of `node` that page index `end` ends in or at; the root for 0."""
    while node.start >= end and node.parent is not None:
        node = node.parent
    return node


def _path(node: Node) -> list[Node]:
    """Nodes on the way from the root to `node`, both included."""
    nodes = [node]
    while (parent := nodes[-1].parent) is not None:
        nodes.append(parent)
    return nodes[::-1]
