"""What hints could add to a policy of eviction: hits of a cache that knows some, or all, of a trace's future.

Blocks stand alone here, without a tree: a trace's block names its whole prefix, so a block is present only while those
before it are. `BEST` evicts what is used again last of all, which no policy without the future can do. `AGENTS` knows
what clients with several turns could say at the end of each: in how many requests the next one comes (what it used is
then retained for twice as long), or that none comes (what no other conversation has used goes first). `ALL` knows it of
prompts that never come again as well. What is retained is at most a part of the pool. `LRU` knows nothing, and must
come out as the tree's.
"""

import heapq
from collections.abc import Sequence
from enum import Enum

Prompt = tuple[int, ...]
Rank = tuple[int, int, int]
"""Least is evicted first: class, time, minus the depth."""
DONE, PLAIN, RETAINED = range(3)
NEVER = 1 << 40
HEADROOM = 2
"""A conversation is waited for this many times as long as it is expected to pause."""


class Knowledge(Enum):
    """What is known of the requests to come."""

    LRU = "lru of blocks"
    AGENTS = "agents hint"
    ALL = "all hint"
    BEST = "best"


class Future:
    """Per request: its conversation, and that one's next request; per use of a block: the block's next use.

    A request goes on with another when it has that one's last block: where that was not full, the turn is not told.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.next_turn = [NEVER] * len(prompts)
        self.next_use: list[tuple[int, ...]] = [()] * len(prompts)
        self.talks = list(range(len(prompts)))
        ends: dict[int, int] = {}
        for time, prompt in enumerate(prompts):
            before = next((ends[block] for block in reversed(prompt) if block in ends), None)
            if before is not None:
                self.next_turn[before], self.talks[time] = time, self.talks[before]
                del ends[prompts[before][-1]]
            if prompt:
                ends[prompt[-1]] = time
        self.has_turns = {talk for time, talk in enumerate(self.talks) if talk != time}
        """Conversations of more than one request."""
        uses: dict[int, int] = {}
        for time in reversed(range(len(prompts))):
            self.next_use[time] = tuple(uses.get(block, NEVER) for block in prompts[time])
            uses.update(dict.fromkeys(prompts[time], time))


class BlockCache:
    """At most `num_pages` blocks; those of the request that is served are never evicted."""

    def __init__(self, num_pages: int, future: Future, knowledge: Knowledge, budget: float) -> None:
        self._num_pages, self._future, self._knowledge = num_pages, future, knowledge
        self._budget = int(budget * num_pages)
        self._held: dict[int, Rank] = {}
        self._order: list[tuple[Rank, int]] = []
        self._retained: dict[int, int] = {}
        """Block |-> the request before which it is retained."""
        self._until: list[tuple[int, int]] = []
        self._owner: dict[int, int] = {}
        """Block |-> the one conversation that has used it since it came; several: NEVER."""

    def serve(self, time: int, prompt: Prompt) -> int:
        """Returns the hits."""
        self._expire(time)
        num_hits = next((at for at, block in enumerate(prompt) if block not in self._held), len(prompt))
        for block in prompt[:num_hits]:
            del self._held[block]
        while len(self._held) + len(prompt) > self._num_pages:
            rank, block = heapq.heappop(self._order)
            if self._held.get(block) == rank:
                del self._held[block], self._owner[block]
                self._retained.pop(block, None)
        talk = self._future.talks[time]
        for block in prompt:
            if self._owner.setdefault(block, talk) != talk:
                self._owner[block] = NEVER
        if self._hints(talk):
            self._retain(time, prompt)
        for at, block in enumerate(prompt):
            self._place(block, self._rank(time, at, block))
        return num_hits

    def _hints(self, talk: int) -> bool:
        return self._knowledge is Knowledge.ALL or (
            self._knowledge is Knowledge.AGENTS and talk in self._future.has_turns
        )

    def _rank(self, time: int, at: int, block: int) -> Rank:
        if self._knowledge is Knowledge.BEST:
            return PLAIN, -self._future.next_use[time][at], -at
        if block in self._retained:
            return RETAINED, time, -at
        ends = self._hints(self._future.talks[time]) and self._future.next_turn[time] == NEVER
        return DONE if ends and self._owner[block] != NEVER else PLAIN, time, -at

    def _place(self, block: int, rank: Rank) -> None:
        self._held[block] = rank
        heapq.heappush(self._order, (rank, block))

    def _retain(self, time: int, prompt: Prompt) -> None:
        """From the head on, as far as the budget reaches."""
        turn = self._future.next_turn[time]
        if turn == NEVER:
            for block in prompt:
                if self._owner[block] != NEVER:
                    self._retained.pop(block, None)
            return
        until = time + HEADROOM * (turn - time) + 1
        for block in prompt:
            if block not in self._retained and len(self._retained) >= self._budget:
                break
            if until > self._retained.get(block, 0):
                self._retained[block] = until
                heapq.heappush(self._until, (until, block))

    def _expire(self, time: int) -> None:
        while self._until and self._until[0][0] <= time:
            until, block = heapq.heappop(self._until)
            if self._retained.get(block) == until:
                del self._retained[block]
                _, used, depth = self._held[block]
                self._place(block, (PLAIN, used, depth))


def known_share(prompts: Sequence[Prompt], num_pages: int, knowledge: Knowledge, budget: float = 0.25) -> float:
    """Blocks that were present, of all; what hints retain is at most the part `budget` of the pool."""
    future = Future(prompts)
    cache = BlockCache(num_pages, future, knowledge, budget)
    return sum(cache.serve(time, prompt[:num_pages]) for time, prompt in enumerate(prompts)) / sum(map(len, prompts))
