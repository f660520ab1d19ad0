"""Hits of each eviction policy at equal memory, on a trace of agents' requests.

    python -m benchmarks.bench_evictions [TRACE.jsonl] [--json FILE]

TRACE is in Mooncake's format: a line per request with `hash_ids`, one for each block of its prompt (the tool-agent and
conversation traces of its paper). Without one a trace is drawn: sessions of ten turns behind ten system prompts, each
turn longer by its answer and a tool's result, with pauses in between, and as many requests again that never come back.
A block is a page here, and each request matches, computes the rest and gives its pages back before the next one comes,
so the figures are those of the policy alone. A pool holds a part of all distinct blocks of the trace. `all`: nothing is
ever evicted. Behind each policy what it comes to where clients say `done` with their last request (`kv_hints`): those
of several turns (`agents done`), or also those that ask once (`all done`). The columns after these say what knowing the
future would add (benchmarks/foresight.py): no policy there is has it.

Then two tenants with a trace each, a request of each in turn, on one tree: one never hints anything, the other one
keeps (`retain_s`) all that it may. `its share` is what the first one has of three quarters of the pool where nobody
keeps anything. Under lru it has no less (tests/property/test_hint_fairness.py), but for pages that count as used with
the rest of their node.
"""

import argparse
import heapq
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.foresight import NEVER, Future, Knowledge, known_share
from deltaserve.commands.load.mooncake_trace import read_trace
from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.eviction import KvEviction
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.core.ids import Namespace
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.tokens import pack_u32

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Pool sizes, as parts of the distinct blocks."""
TENANT_SHARES = SHARES[:3]
"""The same for two tenants, of the blocks of both."""
NUM_SESSIONS, NUM_TURNS, NUM_SYSTEMS = 400, 10, 10
SYSTEM_LEN, TURN_LEN = 24, (1, 8)
"""Blocks of a system prompt, and of what a turn adds."""
ONCE_LEN = (8, 64)
SPACE, PLAIN, KEEPING = map(Namespace, ("bench", "plain", "keeping"))
Prompt = tuple[int, ...]
"""Ids of the blocks."""


def draw_trace(seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    blocks = iter(range(1 << 31))
    systems = [_take(blocks, SYSTEM_LEN) for _ in range(NUM_SYSTEMS)]
    weights = [1 / (rank + 1) for rank in range(NUM_SYSTEMS)]
    requests: list[tuple[float, int, Prompt]] = []
    for session in range(NUM_SESSIONS):
        time, prompt = draw.uniform(0.0, 1000.0), draw.choices(systems, weights)[0]
        for _ in range(NUM_TURNS):
            prompt += _take(blocks, draw.randint(*TURN_LEN))
            requests.append((time, session, prompt))
            time += draw.expovariate(1 / 60)  # a tool runs, or a user reads
    for number in range(NUM_SESSIONS * NUM_TURNS):
        requests.append((draw.uniform(0.0, 1000.0), -1 - number, _take(blocks, draw.randint(*ONCE_LEN))))
    heapq.heapify(requests)
    return [heapq.heappop(requests)[2] for _ in range(len(requests))]


def _take(blocks: Iterator[int], count: int) -> Prompt:
    return tuple(next(blocks) for _ in range(count))


class Told(Enum):
    """Who says when nothing more comes."""

    NOBODY = ""
    AGENTS = "agents done"
    ALL = "all done"

    def last_ones(self, future: Future) -> frozenset[int]:
        """Requests that say it."""
        ends = [time for time, turn in enumerate(future.next_turn) if turn == NEVER]
        wanted = {Told.NOBODY: frozenset[int](), Told.AGENTS: future.has_turns, Told.ALL: frozenset(future.talks)}[self]
        return frozenset(time for time in ends if future.talks[time] in wanted)


class AtEnd(Enum):
    """What a request says with its end."""

    NOTHING = "nothing"
    DONE = "done"
    KEEP = "keep"
    """As much of it as its tenant may keep, for longer than the trace lasts."""


class OneTree:
    """A tree over one pool. A request gets its pages, computes what it lacks, and is over before the next one."""

    def __init__(self, num_pages: int, policy: KvEviction) -> None:
        self._num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(1, (self._pool,), eviction=policy)

    def serve(self, space: Namespace, prompt: Prompt, at_end: AtEnd) -> int:
        """Returns the hits."""
        cache, tokens = self._cache, pack_u32(prompt[: self._num_pages])
        keys = extend_keys(seed_key(b"secret", "model", 1, space), tokens, 1)
        match = cache.match(space, tokens, keys)
        lease = cache.lease(match)
        missing = len(tokens) // 4 - match.num_pages
        cache.evict([max(0, missing - self._pool.num_free)])
        pages = self._pool.allocate(missing)
        assert pages is not None  # a prompt is no longer than the pool
        lease = cache.insert(lease, space, tokens, keys, (pages,)).lease
        if at_end is AtEnd.KEEP:
            cache.retain(lease, NEVER)
        if at_end is AtEnd.DONE:
            cache.retire(lease)
        else:
            cache.release(lease)
        return match.num_pages


def hit_share(
    prompts: Sequence[Prompt], num_pages: int, policy: KvEviction, last_ones: frozenset[int] = frozenset()
) -> float:
    """Blocks that were in the tree, of all. `last_ones`: requests that say that no further turn comes."""
    tree = OneTree(num_pages, policy)
    num_hits = sum(
        tree.serve(SPACE, prompt, AtEnd.DONE if time in last_ones else AtEnd.NOTHING)
        for time, prompt in enumerate(prompts)
    )
    return num_hits / sum(map(len, prompts))


@dataclass(frozen=True, slots=True)
class TenantHits:
    """Hits of two tenants, as parts of the blocks that each asked for. One of them never keeps anything."""

    plain: float
    keeping: float
    """Hits of the other one."""


def tenant_hits(
    plain: Sequence[Prompt], keeping: Sequence[Prompt], num_pages: int, policy: KvEviction, at_end: AtEnd
) -> TenantHits:
    """Both on one tree, a request of each in turn. `at_end`: what each request of the second one says."""
    tree, num_hits = OneTree(num_pages, policy), {PLAIN: 0, KEEPING: 0}
    for mine, other in zip(plain, keeping, strict=True):
        num_hits[PLAIN] += tree.serve(PLAIN, mine, AtEnd.NOTHING)
        num_hits[KEEPING] += tree.serve(KEEPING, other, at_end)
    return TenantHits(num_hits[PLAIN] / sum(map(len, plain)), num_hits[KEEPING] / sum(map(len, keeping)))


def tenants_row(
    plain: Sequence[Prompt], keeping: Sequence[Prompt], num_pages: int, policy: KvEviction
) -> dict[str, float]:
    """Hits of both where nobody keeps anything, and where one keeps all it can; and the other one's share: what it has
    of three quarters of the pool where nobody keeps anything."""
    before = tenant_hits(plain, keeping, num_pages, policy, AtEnd.NOTHING)
    after = tenant_hits(plain, keeping, num_pages, policy, AtEnd.KEEP)
    share = tenant_hits(plain, keeping, num_pages - num_pages // 4, policy, AtEnd.NOTHING)
    return {
        "its share": share.plain,
        "other keeps": after.plain,
        "nobody keeps": before.plain,
        "other: keeps": after.keeping,
        "other: does not": before.keeping,
    }


def of_tenants(plain: Sequence[Prompt], keeping: Sequence[Prompt]) -> dict[str, dict[str, dict[str, float]]]:
    """By policy and pool, printed as well."""
    num_blocks = sum(len({block for prompt in prompts for block in prompt}) for prompts in (plain, keeping))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for policy in KvEviction:
        table = Table(title=f"two tenants, {policy.value}: hits of the one that never keeps anything, and of the other")
        rows = {share: tenants_row(plain, keeping, int(share * num_blocks), policy) for share in TENANT_SHARES}
        for name in ("pool", *rows[TENANT_SHARES[0]]):
            table.add_column(name, justify="right")
        for share, row in rows.items():
            table.add_row(f"{share:.0%}", *(f"{hits:.1%}" for hits in row.values()))
        Console().print(table)
        figures[policy.value] = {f"{share:g}": row for share, row in rows.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    prompts = [request.blocks for request in read_trace(arguments.trace)] if arguments.trace else draw_trace()
    num_blocks = len({block for prompt in prompts for block in prompt})
    most = hit_share(prompts, sum(map(len, prompts)), KvEviction.LRU)
    table = Table(title=f"{len(prompts):,} requests, {num_blocks:,} distinct blocks; all: {most:.1%} are hits")
    known = (Knowledge.AGENTS, Knowledge.ALL, Knowledge.BEST)
    future = Future(prompts)
    real = {f"{policy.value} {told.value}".strip(): (policy, told) for told in Told for policy in KvEviction}
    for name in ("pool", *real, *(knowledge.value for knowledge in known)):
        table.add_column(name, justify="right")
    figures: dict[str, dict[str, float]] = {}
    for share in SHARES:
        num_pages = int(share * num_blocks)
        row = {name: hit_share(prompts, num_pages, how, told.last_ones(future)) for name, (how, told) in real.items()}
        row |= {knowledge.value: known_share(prompts, num_pages, knowledge) for knowledge in known}
        figures[f"{share:g}"] = row
        table.add_row(f"{share:.0%}", *(f"{hits:.1%}" for hits in row.values()))
    Console().print(table)
    tenants = of_tenants(prompts, prompts if arguments.trace else draw_trace(seed=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({"all": most, "hits": figures, "tenants": tenants}, indent=1))


if __name__ == "__main__":
    main()
