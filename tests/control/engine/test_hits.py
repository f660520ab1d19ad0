"""Every combination of what decode and prefill have already: right answers, and the delta alone moves."""

import pytest

from deltaserve.control.engine.status import DecodeState
from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import CacheUse, Grant, PromptLogprobs, Starting
from deltaserve.sim.cluster import VOCAB, Shape
from deltaserve.sim.oracle import oracle_answer
from tests.control.engine.duo import DECODE, FIRST_TOKEN, PAGE_BYTES, PREFILL, Duo, slow_fabric
from tests.sim.small_cluster import Cluster

HEAD = list(range(1, 17))


def check_moved(duo: Duo, before: float, num_pages: int) -> None:
    """Since `before` one request moved: so many pages and a first token, nothing else."""
    assert int(duo.bytes_sent() - before) - num_pages * PAGE_BYTES in FIRST_TOKEN


@pytest.mark.parametrize(
    ("cached_len", "prompt_len", "hit"),
    [(0, 16, 0), (0, 17, 0), (8, 16, 8), (8, 19, 8), (16, 17, 16), (16, 16, 16), (16, 15, 12), (20, 16, 16)],
    ids=["none", "none, partial page", "some", "some, partial page", "all but one token", "all", "shorter", "beyond"],
)
def test_what_decode_has_does_not_move(cached_len: int, prompt_len: int, hit: int) -> None:
    tokens = list(range(1, 30))
    duo = Duo()
    if cached_len:
        duo.serve(tokens[:cached_len], 1)
    before, planned = duo.bytes_sent(), duo.metrics(DECODE)["deltaserve_transfer_bytes_planned_total"]
    asked = duo.serve(tokens[:prompt_len], 4)
    assert asked.usage.decode_cached_len == hit
    num_moved = -(-prompt_len // 4) - hit // 4
    check_moved(duo, before, num_moved)
    metrics = duo.metrics(DECODE)
    assert metrics["deltaserve_transfer_bytes_planned_total"] - planned == num_moved * PAGE_BYTES
    assert metrics["deltaserve_transfer_bytes_landed_total"] == metrics["deltaserve_transfer_bytes_planned_total"]
    grant = duo.sent(Grant, DECODE)[-1]
    assert (grant.coverage[0].first, token_len(grant.coverage[0].pages)) == (hit // 4, -(-prompt_len // 4) - hit // 4)


@pytest.mark.parametrize(("prefill_keeps", "decode_keeps"), [(16, 8), (8, 16), (16, 16), (0, 16), (16, 0)])
def test_each_side_hits_on_its_own(prefill_keeps: int, decode_keeps: int) -> None:
    """Longer on prefill: its cached pages are sent. Shorter: it computes again what it does not send."""
    duo = Duo()
    duo.serve(HEAD, 1)
    for name, keeps in ((PREFILL, prefill_keeps), (DECODE, decode_keeps)):
        fill(duo, name, keeps)
    before = duo.bytes_sent()
    tokens_before = duo.metrics(PREFILL)["deltaserve_computed_tokens_total"]
    asked = duo.serve([*HEAD, 40, 41, 42, 43, 44], 3)
    assert (asked.usage.decode_cached_len, asked.usage.prefill_cached_len) == (decode_keeps, prefill_keeps)
    check_moved(duo, before, 6 - decode_keeps // 4)
    computed = duo.metrics(PREFILL)["deltaserve_computed_tokens_total"] - tokens_before
    assert computed == 21 - prefill_keeps
    assert duo.sent(Starting)[-1].cached_len == prefill_keeps


def fill(duo: Duo, name: PeerName, keeps: int) -> None:
    """Cut one side's tree, which holds all of HEAD, to its first tokens."""
    instance = duo.decode if name == DECODE else duo.prefill
    instance.parts.cache.evict(((len(HEAD) - keeps) // 4,))


def test_a_full_hit_on_both_sides_computes_one_page_and_moves_none() -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    before = duo.bytes_sent()
    asked = duo.serve(HEAD, 5)
    assert (asked.usage.decode_cached_len, asked.usage.prefill_cached_len) == (16, 12)
    check_moved(duo, before, 0)


# ---------------------------------------------------------------- who shares


def test_namespaces_share_nothing_on_either_side() -> None:
    duo = Duo()
    duo.serve(HEAD, 3, namespace="alice")
    bob = duo.serve(HEAD, 3, namespace="bob")
    assert (bob.usage.decode_cached_len, bob.usage.prefill_cached_len) == (0, 0)
    alice = duo.serve(HEAD, 3, namespace="alice")
    assert alice.usage.decode_cached_len == 16


def test_bypass_leaves_the_trees_empty_and_takes_nothing_from_them() -> None:
    duo = Duo()
    asked = duo.ask(HEAD, 5, cache=CacheUse.BYPASS)
    duo.settle(asked)
    assert (duo.cached_pages(DECODE), duo.cached_pages(PREFILL)) == (0, 0)
    duo.serve(HEAD, 5)
    again = duo.ask(HEAD, 5, cache=CacheUse.BYPASS)
    duo.settle(again)
    assert (again.usage.decode_cached_len, again.usage.prefill_cached_len) == (0, 0)


def test_a_disabled_tree_stays_empty() -> None:
    duo = Duo(Shape(radix_cache=False))
    for _ in range(2):
        asked = duo.serve(HEAD, 5)
        assert asked.usage.decode_cached_len == 0
    assert (duo.cached_pages(DECODE), duo.cached_pages(PREFILL)) == (0, 0)


@pytest.mark.parametrize("count", [2, 6])
def test_a_cold_prefix_is_computed_once_and_moved_once(count: int) -> None:
    duo = Duo(Shape(decode_pages=100, prefill_pages=100), fabric=slow_fabric())
    shared = list(range(1, 41))
    asked = [duo.ask([*shared, 60 + i, 70 + i], 4) for i in range(count)]
    duo.settle(*asked)
    assert duo.metrics(PREFILL)["deltaserve_computed_tokens_total"] == 40 + 2 * count
    assert duo.bytes_sent() < (10 + count) * PAGE_BYTES + count * FIRST_TOKEN.stop
    assert sorted(a.usage.decode_cached_len for a in asked) == [0] + [40] * (count - 1)


def test_waiting_for_a_duplicate_is_bounded() -> None:
    """The first room's transfer takes longer than anyone should wait: the second one moves the prefix itself."""
    duo = Duo(Shape(decode_pages=100), fabric=slow_fabric(5.0))
    shared = list(range(1, 33))
    first, second = duo.ask([*shared, 60], 2), duo.ask([*shared, 61], 2)
    start = duo.world.now
    duo.until(lambda: (room := duo.decode_room(second)) is not None and room.state is DecodeState.STARTED)
    duo.until(lambda: (room := duo.decode_room(second)) is not None and room.state is DecodeState.GRANTED)
    waited = duo.world.now - start
    limit = duo.decode.config.options.share_wait_s
    assert limit <= waited <= limit + 0.5
    duo.settle(first, second, limit_s=60.0)


def test_a_duplicates_failure_wakes_those_that_waited_for_it() -> None:
    duo = Duo(Shape(decode_pages=100), fabric=slow_fabric(0.5))
    shared = list(range(1, 33))
    first, second = duo.ask([*shared, 60], 2), duo.ask([*shared, 61], 2)
    duo.until(lambda: (room := duo.decode_room(first)) is not None and room.state is DecodeState.GRANTED)
    duo.until(lambda: (room := duo.decode_room(second)) is not None and room.state is DecodeState.STARTED)
    duo.cancel(first)
    duo.settle(second)
    assert second.usage.decode_cached_len == 0


# ---------------------------------------------------------------- prompt log-probabilities, retraction


def test_prompt_logprobs_match_nothing_on_prefill_and_all_on_decode() -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    generation = duo.cluster.generation(HEAD, 3)
    sampling = generation.sampling.__class__(max_tokens=3, seed=1, temperature=0.0, prompt_logprobs=0)
    computed = duo.metrics(PREFILL)["deltaserve_computed_tokens_total"]
    plans: list[StepPlan] = []
    execute = duo.worker(PREFILL).executor.execute

    def watched(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(plan)

    duo.worker(PREFILL).executor.execute = watched  # type: ignore[method-assign]
    room = generation.__class__(
        generation.room, generation.prompt, generation.namespace, sampling, generation.deadline_s, generation.cache
    )
    answer = duo.cluster.front.submit(room)
    duo.until(lambda: duo.metrics(PREFILL)["deltaserve_computed_tokens_total"] - computed == 16)
    assert all(item.wants_prompt_logprobs for plan in plans for item in plan.items)
    duo.until(lambda: bool(duo.sent(Grant, DECODE)) and duo.sent(Grant, DECODE)[-1].room == generation.room)
    assert duo.sent(Grant, DECODE)[-1].coverage[0].first == 4
    duo.until(lambda: bool(answer.ends))
    told = [value for frame in duo.sent(PromptLogprobs, DECODE) for value in frame.values]
    assert tuple(told) == oracle_answer(room.prompt, sampling, VOCAB).prompt_logprobs


@pytest.mark.parametrize("extend_len", [0, 100], ids=["through prefill", "extended here"])
def test_a_retracted_request_resumes_from_what_it_left(extend_len: int) -> None:
    duo = Duo(Shape(decode_pages=16, reserve_len=0, extend_len=extend_len))
    asked = [duo.ask([80 + i, *range(1, 20)], 30) for i in range(2)]
    duo.settle(*asked)
    resumed = [a for a in asked if a.usage.num_retractions]
    assert resumed
    for one in resumed:
        attempts = {s.attempt for s in duo.sent(Starting) if s.room == one.room}
        assert attempts == set(range(1, (1 if extend_len else 1 + one.usage.num_retractions) + 1))


@pytest.mark.parametrize(("prefill_wait_len", "is_near"), [(200, True), (1, False)])
def test_a_retracted_request_goes_by_the_rule_of_its_prompt(prefill_wait_len: int, is_near: bool) -> None:
    """On shared cores decode computes a rest of any length, unless prefill holds so much more of it."""
    duo = Duo(Shape(decode_pages=16, reserve_len=0, extend_len=0, shares_cores=True))
    duo.weigh(prefill_wait_len)
    asked = [duo.ask([80 + i, *range(1, 20)], 30) for i in range(2)]
    duo.settle(*asked)
    resumed = [a for a in asked if a.usage.num_retractions]
    assert resumed
    for one in resumed:
        attempts = [s.attempt for s in duo.sent(Starting) if s.room == one.room]
        assert bool(attempts) is not is_near


def test_a_retracted_unified_request_is_computed_again_from_its_pages() -> None:
    cluster = Cluster(Shape(num_prefill=0, num_decode=0, num_unified=1, decode_pages=16, reserve_len=0))
    cluster.warm_up()
    answers = [cluster.front.submit(cluster.generation([80 + i, *range(1, 20)], 30)) for i in range(2)]
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: all(a.ends for a in answers))
    assert all(a.error is None for a in answers)
    usages = [a.last.usage for a in answers if a.last is not None and a.last.usage is not None]
    assert sum(u.num_retractions for u in usages) >= 1
    cluster.world.run(until=cluster.world.now + 1.0)
    cluster.check()
    assert cluster.is_quiet()
