"""Speed and memory of the prefix cache: many users on a few very long shared prefixes.

    python -m benchmarks.bench_cache [--json]

20 prefixes of 50,000 tokens, 50 suffixes of 4,500 tokens each, page size 64. Each request matches, leases, inserts its
delta and releases, as a decode worker does. Times are microseconds of one call on one core.
"""

import argparse
import random
import tracemalloc
from dataclasses import dataclass
from functools import partial

from benchmarks.call_times import CallTimes, print_times, timed
from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.core.ids import Namespace
from deltaserve.core.keys import extend_keys, seed_key

PAGE_SIZE = 64
TOKEN_BYTES = 4
NUM_PREFIXES, PREFIX_LEN = 20, 50_000
NUM_SUFFIXES, SUFFIX_LEN = 50, 4_500
EVICT_PAGES = 8192 // PAGE_SIZE
SPACE = Namespace("bench")
SEED = seed_key(b"secret", "model", PAGE_SIZE, SPACE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Packed ids and packed keys of one prompt."""

    tokens: bytes
    keys: bytes

    @property
    def num_pages(self) -> int:
        return len(self.tokens) // (PAGE_SIZE * TOKEN_BYTES)


def prompt_of(tokens: bytes) -> Prompt:
    return Prompt(tokens, extend_keys(SEED, tokens, PAGE_SIZE))


def ids(rng: random.Random, num_tokens: int) -> bytes:
    return rng.randbytes(num_tokens * TOKEN_BYTES)


def workload(rng: random.Random) -> list[Prompt]:
    """Every (prefix, suffix) pair, in random order: the tree grows as it would under traffic."""
    prefixes = [ids(rng, PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    prompts = [prompt_of(prefix + ids(rng, SUFFIX_LEN)) for prefix in prefixes for _ in range(NUM_SUFFIXES)]
    rng.shuffle(prompts)
    return prompts


def serve(cache: PrefixCache, pool: PagePool, prompt: Prompt) -> None:
    """match + lease + insert + release, allocation included."""
    lease = cache.lease(cache.match(SPACE, prompt.tokens, prompt.keys))
    pages = pool.allocate(prompt.num_pages - lease.num_pages)
    if pages is None:
        raise RuntimeError("the benchmark's pool is too small")
    cache.release(cache.insert(lease, SPACE, prompt.tokens, prompt.keys, (pages,)).lease)


def filled(prompts: list[Prompt]) -> tuple[PrefixCache, PagePool]:
    pool = PagePool(sum(prompt.num_pages for prompt in prompts))
    cache = PrefixCache(PAGE_SIZE, (pool,))
    for prompt in prompts:
        serve(cache, pool, prompt)
    return cache, pool


def leaves(rng: random.Random, count: int, leaf_len: int) -> list[Prompt]:
    """`count` prompts that share one page and nothing else: as many leaves."""
    shared = ids(rng, PAGE_SIZE)
    return [prompt_of(shared + ids(rng, leaf_len)) for _ in range(count)]


def conversation(rng: random.Random, turns: int, turn_len: int) -> list[Prompt]:
    """Prompts of a growing conversation, each one turn longer."""
    tokens = b""
    prompts = []
    for _ in range(turns):
        tokens += ids(rng, turn_len)
        prompts.append(prompt_of(tokens))
    return prompts


def measure_long_prefixes(rng: random.Random) -> list[CallTimes]:
    prompts = workload(rng)
    pool = PagePool(2 * sum(prompt.num_pages for prompt in prompts))
    cache = PrefixCache(PAGE_SIZE, (pool,))
    rows = [timed("match + lease + insert + release, tree growing", [partial(serve, cache, pool, p) for p in prompts])]
    fresh = [prompt_of(prompt.tokens[: PREFIX_LEN * TOKEN_BYTES] + ids(rng, SUFFIX_LEN)) for prompt in prompts]
    rows.append(timed("match, 50K hit", [partial(cache.match, SPACE, p.tokens, p.keys) for p in fresh]))
    rows.append(timed("match, 54.5K hit", [partial(cache.match, SPACE, p.tokens, p.keys) for p in prompts]))
    rows.append(timed("match + lease + insert + release, 50K hit", [partial(serve, cache, pool, p) for p in fresh]))
    rows.append(timed("keys of a 54.5K prompt (hashing)", [partial(prompt_of, p.tokens) for p in prompts]))
    held = [cache.lease(cache.match(SPACE, p.tokens, p.keys)) for p in prompts]
    rows.append(timed("lease.pages, 851 pages", [partial(h.pages, 0) for h in held]))
    rows.append(timed("lease.path", [h.path for h in held]))
    return rows


def measure_deep_tree(rng: random.Random) -> list[CallTimes]:
    prompts = conversation(rng, 200, 256)
    pool = PagePool(prompts[-1].num_pages)
    cache = PrefixCache(PAGE_SIZE, (pool,))
    rows = [timed("conversation turn, 200 of 256 tokens", [partial(serve, cache, pool, p) for p in prompts])]
    last = prompts[-1]
    rows.append(timed("match, 51K hit after 200 turns", [lambda: cache.match(SPACE, last.tokens, last.keys)] * 1000))
    return rows


def measure_eviction(rng: random.Random, count: int, leaf_len: int) -> CallTimes:
    cache, _ = filled(leaves(rng, count, leaf_len))
    calls = min(200, cache.evictable_pages(0) // EVICT_PAGES)
    name = f"evict 8192 tokens, {count} leaves of {leaf_len}"
    return timed(name, [lambda: cache.evict((EVICT_PAGES,))] * calls)


def measure_pool() -> list[CallTimes]:
    pool = PagePool(100_000)
    taken = [pool.allocate(EVICT_PAGES) or () for _ in range(500)]
    frees = timed("pool.free, 128 pages", [partial(pool.free, t) for t in taken])
    return [timed("pool.allocate, 128 pages", [lambda: pool.allocate(EVICT_PAGES)] * 500), frees]


def measure_memory(rng: random.Random) -> dict[str, float]:
    """Bytes of the tree alone, for every page it holds, and per token. Ids take 4 bytes per token of that."""
    prompts = workload(rng)
    pool = PagePool(sum(prompt.num_pages for prompt in prompts))
    tracemalloc.start()
    cache = PrefixCache(PAGE_SIZE, (pool,))
    for prompt in prompts:
        serve(cache, pool, prompt)
        cache.drain_events()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pages = cache.evictable_pages(0)
    return {"tree_mib": used / 2**20, "pages": pages, "bytes_per_page": used / pages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json: bool = parser.parse_args().json
    rng = random.Random(0)
    rows = measure_long_prefixes(rng) + measure_deep_tree(rng) + measure_pool()
    rows += [measure_eviction(rng, count, leaf_len) for count, leaf_len in ((1000, 4500), (10_000, 4500), (10_000, 64))]
    memory = measure_memory(rng)
    summary = f"{memory['tree_mib']:.1f} MiB, {memory['bytes_per_page']:.0f} bytes a page"
    print_times(rows, memory, f"tree of {memory['pages']:,} pages: {summary}", as_json=as_json)


if __name__ == "__main__":
    main()
