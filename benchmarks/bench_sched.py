"""Speed and memory of the scheduler: what the control plane adds to every step of a large decode batch.

    python -m benchmarks.bench_sched [--json] [--profile]

128 running requests of 50,000 tokens on 20 shared prefixes (45,500 shared + 4,500 private tokens), page size 64. A step
is plan() and commit(), with the executor's answer made up. Times are microseconds on one core. The bar: p50 <= 1,000.
"""

import argparse
import cProfile
import pstats
import random
import tracemalloc

from benchmarks.call_times import CallTimes, print_times, timed
from deltaserve.control.cache.allocator import PagePool
from deltaserve.control.cache.prefix_cache import PrefixCache
from deltaserve.control.sched.budget import Budget
from deltaserve.control.sched.plan import ItemResult, Sampled, StepPlan, StepResult
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.sched_config import SchedConfig
from deltaserve.control.sched.scheduler import Scheduler
from deltaserve.core.ids import Namespace, Room
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import TOKEN_BYTES, pack_u32

PAGE_SIZE = 64
NUM_REQUESTS, NUM_PREFIXES = 128, 20
PREFIX_LEN, SUFFIX_LEN = 45_500, 4_500
NUM_STEPS, NUM_TURNS = 500, 200
SPACE = Namespace("bench")
SEED = seed_key(b"secret", "model", PAGE_SIZE, SPACE)


class Bench:
    """A scheduler whose requests have all landed from prefill, as on a decode worker."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefixes = [self._ids(PREFIX_LEN) for _ in range(NUM_PREFIXES)]
        self._num_rooms = 0
        pages = NUM_PREFIXES * PREFIX_LEN // PAGE_SIZE + 2 * NUM_REQUESTS * (SUFFIX_LEN + 2 * NUM_STEPS) // PAGE_SIZE
        self.pool = PagePool(pages)
        self.cache = PrefixCache(PAGE_SIZE, (self.pool,))
        self.budget = Budget(self.cache, (self.pool,))
        config = SchedConfig(
            page_size=PAGE_SIZE,
            max_running=NUM_REQUESTS,
            chunk_len=512,
            step_len=2048,
            split_tokens=256,
            reserve_len=64,
        )
        self.scheduler = Scheduler(config, self.cache, self.budget, lambda namespace: SEED)

    def _ids(self, num_tokens: int) -> bytes:
        return self._rng.randbytes(num_tokens * TOKEN_BYTES)

    def request(self, prefix: int) -> Request:
        """A prompt on one of the prefixes."""
        self._num_rooms += 1
        tokens = self._prefixes[prefix] + self._ids(SUFFIX_LEN)
        return Request(
            room=Room(self._num_rooms.to_bytes(16, "little")),
            namespace=SPACE,
            sampling=SamplingParams(max_tokens=10**6, seed=1),
            prompt_len=len(tokens) // TOKEN_BYTES,
            tokens=bytearray(tokens),
            keys=bytearray(extend_keys(SEED, tokens, PAGE_SIZE)),
            arrival=float(self._num_rooms),
            deadline=1e9,
        )

    def land(self, request: Request) -> None:
        """Lease what is here, allocate the delta, share it, queue for a row: what a landed transfer does."""
        match = self.cache.match(SPACE, request.tokens, request.keys)
        request.lease = self.cache.lease(match)
        owned = self.budget.allocate((-(-request.num_tokens // PAGE_SIZE) - request.lease.num_pages,))
        if owned is None:
            raise RuntimeError("the benchmark's pool is too small")
        request.own(owned, (request.lease.num_pages,))
        request.num_computed = request.num_tokens
        self.scheduler.running.share_computed(request)
        request.append(1)
        self.scheduler.waiting.add_landed(request)

    def fill(self) -> None:
        for index in range(NUM_REQUESTS):
            self.land(self.request(index % NUM_PREFIXES))
        while self.scheduler.waiting.admit(0.0):
            pass
        self.step()

    def step(self) -> StepPlan:
        plan = self.scheduler.steps.plan()
        if plan is None:
            raise RuntimeError("nothing to plan")
        self.scheduler.steps.commit(answer(plan))
        return plan

    def turn(self) -> None:
        """A request ends, another one takes its place, and the batch steps: the shared runs are found anew."""
        oldest = next(iter(self.scheduler.running))
        self.scheduler.finish(oldest)
        self.land(self.request(self._rng.randrange(NUM_PREFIXES)))
        self.scheduler.waiting.admit(0.0)


def answer(plan: StepPlan) -> StepResult:
    others = tuple(ItemResult(item.row, (Sampled(7),)) for item in plan.others)
    return StepResult(plan.step, others, decoded=pack_u32([7]) * plan.num_going_on)


def measure(rng: random.Random) -> list[CallTimes]:
    bench = Bench(rng)
    bench.fill()
    scheduler = bench.scheduler
    plans: list[StepPlan] = []
    answers: list[StepResult] = []

    def plan() -> None:
        made = scheduler.steps.plan()
        if made is not None:
            plans.append(made)

    def commit() -> None:
        scheduler.steps.commit(answers.pop())

    def plan_and_commit() -> None:
        plan()
        scheduler.steps.commit(answer(plans.pop()))

    def prepare_commit() -> None:
        plan()
        answers.append(answer(plans.pop()))

    def finish_plan() -> None:
        if plans:
            scheduler.steps.commit(answer(plans.pop()))

    rows = [timed(f"plan + commit, {NUM_REQUESTS} decode rows, steady", [plan_and_commit] * NUM_STEPS)]
    rows.append(timed("plan, steady", [plan] * (NUM_STEPS // 2), finish_plan))
    finish_plan()
    rows.append(timed("commit, steady", [commit] * (NUM_STEPS // 2), prepare_commit))
    rows.append(timed("plan + commit, one request replaced before", [plan_and_commit] * NUM_TURNS, bench.turn))
    rows.append(timed("finish + land + admit of one request", [bench.turn] * NUM_TURNS, plan_and_commit))
    waiting = [bench.request(index % NUM_PREFIXES) for index in range(64)]
    for request in waiting:
        scheduler.waiting.add(request)
    rows.append(timed("admit, 64 waiting and no row free", [lambda: scheduler.waiting.admit(0.0)] * NUM_TURNS))
    return rows


def measure_memory(rng: random.Random) -> dict[str, float]:
    """Bytes of 128 running requests: tree, leases, requests, scheduler; token ids and keys included."""
    bench = Bench(rng)
    tracemalloc.start()
    bench.fill()
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ids = NUM_REQUESTS * (PREFIX_LEN + SUFFIX_LEN) * TOKEN_BYTES
    return {"total_mib": used / 2**20, "peak_mib": peak / 2**20, "token_ids_mib": ids / 2**20}


def profile(rng: random.Random) -> None:
    bench = Bench(rng)
    bench.fill()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        bench.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--profile", action="store_true", help="profile steady steps instead")
    args = parser.parse_args()
    if args.profile:
        profile(random.Random(0))
        return
    rows, memory = measure(random.Random(0)), measure_memory(random.Random(0))
    summary = f"128 requests: {memory['total_mib']:.1f} MiB, of it token ids {memory['token_ids_mib']:.1f} MiB"
    print_times(rows, memory, summary, as_json=args.json)


if __name__ == "__main__":
    main()
