"""In how many runs of consecutive pages a prompt lies on an aged pool: a transfer takes one descriptor for each.

    python -m benchmarks.bench_runs [--requests 1000] [--json]

A decode worker's life in pages: prompts of 8 to 160 pages, half of them the next turn of an earlier conversation, are
matched, granted, landed, grow page by page side by side, and end in the tree, which fills the pool: from then on every
page is had by eviction. Counted over grants of at least 8 pages in the second half of the requests.
"""

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise

from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.lease import Lease
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.core.ids import Namespace, PageId
from deltaserve.core.keys import extend_keys, seed_key

PAGE_SIZE = 16
PAGE_BYTES = 4 * PAGE_SIZE
SPACE = Namespace("bench")
SEED = seed_key(b"secret", "model", PAGE_SIZE, SPACE)
SHAPES = ((4096, 8), (16384, 32))
"""(pages of the pool, requests at once)"""
NUM_CONVERSATIONS = 200
LEAST_PAGES = 8


@dataclass(slots=True)
class Running:
    """A request that decodes."""

    tokens: bytes
    lease: Lease
    pages: list[PageId]
    pages_to_grow: int


class Worker:
    """Pool, tree and what runs on them."""

    def __init__(self, num_pages: int, rng: random.Random) -> None:
        self.rng = rng
        self.running: list[Running] = []
        self.conversations: list[bytes] = []
        self.num_ended = 0
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(PAGE_SIZE, (self.pool,))
        self.budget = Budget(self.cache, (self.pool,))

    def prompt(self) -> bytes:
        if self.conversations and self.rng.random() < 0.5:
            earlier = self.conversations.pop(self.rng.randrange(len(self.conversations)))
            if len(earlier) < 400 * PAGE_BYTES:
                return earlier + self.rng.randbytes(PAGE_BYTES * self.rng.randint(1, 20))
        return self.rng.randbytes(PAGE_BYTES * self.rng.randint(8, 160))

    def admit(self) -> tuple[PageId, ...] | None:
        """Pages granted to another prompt."""
        tokens = self.prompt()
        lease = self.cache.lease(self.cache.match(SPACE, tokens, extend_keys(SEED, tokens, PAGE_SIZE)))
        need = len(tokens) // PAGE_BYTES - lease.num_pages
        pages = self.pool.grant(need) if self.budget.make_room((need,)) else None
        if pages is None:
            self.cache.release(lease)
            return None
        self.pool.land(pages)
        self.running.append(Running(tokens, lease, list(pages), self.rng.randint(4, 40)))
        return pages

    def step(self) -> None:
        """Some grow by a page, some end."""
        for request in list(self.running):
            if self.rng.random() > 0.3:
                continue
            if not request.pages_to_grow:
                self.end(request)
            elif self.budget.make_room((1,)):
                request.pages += self.pool.allocate(1) or ()
                request.tokens += self.rng.randbytes(PAGE_BYTES)
                request.pages_to_grow -= 1

    def end(self, request: Running) -> None:
        keys = extend_keys(SEED, request.tokens, PAGE_SIZE)
        inserted = self.cache.insert(request.lease, SPACE, request.tokens, keys, (tuple(request.pages),))
        self.cache.release(inserted.lease)
        self.cache.drain_events()
        self.running.remove(request)
        self.conversations = [*self.conversations[1 - NUM_CONVERSATIONS :], request.tokens]
        self.num_ended += 1


def pages_per_run(num_pages: int, num_rows: int, num_requests: int) -> list[tuple[int, int]]:
    """(pages, runs) of each grant."""
    worker = Worker(num_pages, random.Random(0))
    grants = []
    while worker.num_ended < num_requests:
        while len(worker.running) < num_rows:
            pages = worker.admit()
            if pages is None:
                break
            if len(pages) >= LEAST_PAGES and worker.num_ended > num_requests // 2:
                grants.append((len(pages), sum(page != before + 1 for before, page in pairwise([-2, *pages]))))
        worker.step()
    return grants


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = []
    for num_pages, num_rows in SHAPES:
        grants = pages_per_run(num_pages, num_rows, args.requests * num_pages // SHAPES[0][0])
        mean = sum(pages for pages, _ in grants) / sum(count for _, count in grants)
        rows.append(
            (num_pages, num_rows, len(grants), mean, statistics.median(pages / count for pages, count in grants))
        )
    if args.json:
        names = ("pool_pages", "requests_at_once", "grants", "mean_pages_per_run", "median_pages_per_run")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    print(f"{'pool pages':>10}{'at once':>9}{'grants':>8}{'pages per run: mean':>21}{'median grant':>14}")
    for num_pages, num_rows, num_grants, mean, median in rows:
        print(f"{num_pages:>10}{num_rows:>9}{num_grants:>8}{mean:>21.2f}{median:>14.2f}")


if __name__ == "__main__":
    main()
