"""A file under the tree: what was evicted is loaded instead of computed, and nothing wrong ever is."""

from dataclasses import replace

import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.engine.tiering import Loadable, Tiering
from deltaserve.control.engine.way_price import WayPrice
from deltaserve.control.front.events import FlushAsked
from deltaserve.core.ids import Namespace, PeerName
from deltaserve.core.keys import KEY_BYTES, extend_keys, key_at
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Offer
from deltaserve.sim.cluster import Shape
from deltaserve.sim.faults import FaultKind
from tests.control.engine.duo import DECODE, PREFILL, Duo

SMALL = Shape(prefill_pages=8, decode_pages=8, tier_slots=64, context_len=32)
HEAD = list(range(1, 17))
"""Four pages."""
OTHERS = [[90 - at for at in range(16)], [40 + at for at in range(16)]]


def tiering(duo: Duo, name: PeerName = PREFILL) -> Tiering:
    found = duo.worker(name).instance.parts.tiering
    assert found is not None
    return found


def computed(duo: Duo) -> float:
    return duo.metrics(PREFILL)["deltaserve_computed_tokens_total"]


def rest(duo: Duo) -> None:
    """Until everything is copied."""
    duo.until(lambda: not any(tiering(duo, name).is_copying for name in (PREFILL, DECODE)))


def with_evicted_head(shape: Shape = SMALL, namespace: str = "") -> Duo:
    """HEAD was served, copied, and is in no tree any more."""
    duo = Duo(shape)
    duo.serve([*HEAD, 50], 2, namespace=namespace)
    rest(duo)
    for name in (PREFILL, DECODE):
        duo.flush(name)
    assert duo.cached_pages(PREFILL) == duo.cached_pages(DECODE) == 0
    return duo


def test_what_was_evicted_is_loaded_and_not_computed() -> None:
    duo = with_evicted_head()
    before = computed(duo)
    asked = duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 2
    assert (asked.usage.prefill_cached_len, asked.usage.decode_cached_len) == (16, 16)
    assert (asked.usage.prefill_loaded_len, asked.usage.decode_loaded_len) == (16, 16)
    again = duo.serve([*HEAD, 53], 3)
    assert (again.usage.prefill_loaded_len, again.usage.decode_loaded_len) == (0, 0)
    for name in (PREFILL, DECODE):
        metrics = duo.metrics(name)
        assert (metrics["deltaserve_tier_pages_loaded_total"], metrics["deltaserve_tier_tokens_loaded_total"]) == (
            4,
            16,
        )
    rest(duo)
    assert tiering(duo).num_busy_slots == 0


def test_prompts_that_evict_each_other_are_loaded_in_turn() -> None:
    duo = Duo(SMALL)
    for prompt in (HEAD, *OTHERS):
        duo.serve([*prompt, 50], 2)
    before = computed(duo)
    for _ in range(3):
        for prompt in (HEAD, *OTHERS):
            duo.serve([*prompt, 50], 2)
    assert computed(duo) - before == 9
    rest(duo)


def test_without_a_file_it_is_computed_again() -> None:
    duo = Duo(replace(SMALL, tier_slots=0))
    duo.serve([*HEAD, 50], 2)
    duo.flush(PREFILL)
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 18
    assert not any("tier" in name for name in duo.metrics(PREFILL))


def test_another_namespace_finds_nothing() -> None:
    duo = with_evicted_head(namespace="one")
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3, namespace="two")
    assert computed(duo) - before == 18


@pytest.mark.parametrize("kind", [FaultKind.SLOT_FAILS, FaultKind.SLOT_SPOILS])
def test_a_slot_that_is_not_right_is_not_believed(kind: FaultKind) -> None:
    duo = Duo(SMALL)
    slots = [rank.slots for name in (PREFILL, DECODE) for rank in duo.worker(name).ranks]
    for of_rank in slots:
        assert of_rank is not None
        of_rank.fails = lambda asked: asked is kind
    duo.serve([*HEAD, 50], 2)
    rest(duo)
    for name in (PREFILL, DECODE):
        duo.flush(name)
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 18
    assert duo.metrics(PREFILL)["deltaserve_tier_failures_total"] > 0
    rest(duo)


def test_a_load_that_fails_midway_gives_what_was_read_and_forgets_the_rest() -> None:
    duo = with_evicted_head()
    rank = duo.worker(PREFILL).ranks[0]
    assert rank.slots is not None
    reads: list[FaultKind] = []

    def third(kind: FaultKind) -> bool:
        reads.append(kind)
        return len(reads) == 3

    rank.slots.fails = third
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 10
    rest(duo)


def test_a_page_that_is_copied_stays_as_it_is_though_it_is_evicted() -> None:
    duo = Duo(SMALL)
    asked = duo.ask([*HEAD, 50], 2)
    pool = duo.worker(PREFILL).instance.parts.pools[0]
    duo.until(lambda: bool(tiering(duo)._stores))
    assert pool.num_pinned > 0
    duo.settle(asked)
    rest(duo)
    assert pool.num_pinned == pool.num_held == 0


def test_a_flush_empties_the_file_too_also_of_what_is_being_copied() -> None:
    duo = with_evicted_head()
    assert len(tiering(duo).tiers[0]) == 4
    duo.cluster.front.tell(FlushAsked())
    duo.run(0.5)
    assert len(tiering(duo).tiers[0]) == len(tiering(duo, DECODE).tiers[0]) == 0
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 18


def test_kv_that_is_worthless_is_not_in_the_file_either() -> None:
    duo = with_evicted_head()
    duo.prefill.parts.cache.poison(Namespace(""), b"", b"")
    assert len(tiering(duo).tiers[0]) == 0


def test_what_was_forgotten_while_it_was_read_is_not_used() -> None:
    duo = with_evicted_head()
    before = computed(duo)
    asked = duo.ask([*HEAD, 51, 52], 3)
    duo.until(lambda: bool(tiering(duo).owned(0)))
    tiering(duo).clear()
    duo.settle(asked)
    assert computed(duo) - before == 18
    assert duo.metrics(PREFILL)["deltaserve_tier_pages_loaded_total"] == 0


def test_two_requests_wait_for_one_load() -> None:
    duo = with_evicted_head()
    before = computed(duo)
    first, second = duo.ask([*HEAD, 51, 52], 3), duo.ask([*HEAD, 53, 54], 3)
    duo.settle(first, second)
    assert computed(duo) - before == 4
    assert duo.metrics(PREFILL)["deltaserve_tier_pages_loaded_total"] == 4


def test_a_client_that_leaves_takes_no_page_of_a_load_with_it() -> None:
    duo = with_evicted_head()
    asked = duo.ask([*HEAD, 51, 52], 3)
    duo.until(lambda: bool(tiering(duo).owned(0)))
    duo.cancel(asked)
    duo.until(lambda: not tiering(duo).is_copying)
    duo.quiet()
    assert duo.worker(PREFILL).instance.parts.pools[0].count(PageState.OWNED) == 0


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)])
def test_workers_of_several_ranks(ranks: tuple[int, int]) -> None:
    duo = with_evicted_head(replace(SMALL, num_heads=2, prefill_ranks=ranks[0], decode_ranks=ranks[1]))
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 2


def test_a_small_file_keeps_what_was_used_last() -> None:
    duo = Duo(replace(SMALL, tier_slots=4))
    for prompt in (HEAD, OTHERS[0]):
        duo.serve(prompt, 1)
        rest(duo)
    assert len(tiering(duo).tiers[0]) == 4
    assert duo.metrics(PREFILL)["deltaserve_tier_pages_evicted_total"] == 4


@pytest.mark.parametrize("num_pools", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_and_states_come_back_with_the_pages(num_pools: int, ranks: int) -> None:
    shape = replace(SMALL, num_pools=num_pools, num_heads=2, prefill_ranks=ranks, decode_ranks=ranks)
    duo = with_evicted_head(shape)
    before = computed(duo)
    asked = duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 2
    assert (asked.usage.prefill_cached_len, asked.usage.decode_cached_len) == (16, 16)
    assert duo.metrics(PREFILL)["deltaserve_tier_tokens_loaded_total"] == 16
    assert duo.metrics(PREFILL)["deltaserve_tier_pages_loaded_total"] > 4
    assert duo.metrics(DECODE)["deltaserve_tier_pages_loaded_total"] == 4
    rest(duo)
    assert tiering(duo).num_busy_slots == 0


@pytest.mark.parametrize("num_pools", [2, 3])
def test_a_window_or_state_alone_comes_back_where_keys_and_values_stayed(num_pools: int) -> None:
    duo = Duo(replace(SMALL, num_pools=num_pools))
    duo.serve([*HEAD, 50], 2)
    rest(duo)
    cache, pools = duo.prefill.parts.cache, range(1, num_pools)
    cache.evict([0, *(cache.pools[pool].num_pages for pool in pools)])
    assert [cache.evictable_pages(pool) for pool in pools] == [0] * (num_pools - 1)
    before, num_full = computed(duo), cache.evictable_pages(0)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 2
    metrics = duo.metrics(PREFILL)
    assert num_full >= 4
    assert metrics["deltaserve_tier_tokens_loaded_total"] == 16
    assert 0 < metrics["deltaserve_tier_pages_loaded_total"] <= 4 * (num_pools - 1)


@pytest.mark.parametrize("num_pools", [2, 3])
@pytest.mark.parametrize("which", [1, 5])
def test_of_a_load_that_fails_midway_nothing_enters_the_tree_without_its_window(num_pools: int, which: int) -> None:
    duo = with_evicted_head(replace(SMALL, num_pools=num_pools))
    (rank,) = duo.worker(PREFILL).ranks
    assert rank.slots is not None
    reads: list[FaultKind] = []

    def fails(kind: FaultKind) -> bool:
        reads.append(kind)
        return len(reads) == which

    rank.slots.fails = fails
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before > 2
    assert duo.metrics(PREFILL)["deltaserve_tier_failures_total"] == 1
    rest(duo)
    pools = duo.worker(PREFILL).instance.parts.pools
    assert [pool.count(PageState.OWNED) for pool in pools] == [0] * num_pools


@pytest.mark.parametrize("num_pools", [2, 3])
def test_a_window_or_state_that_the_file_lacks_makes_what_is_loaded_shorter(num_pools: int) -> None:
    duo = with_evicted_head(replace(SMALL, num_pools=num_pools, state_interval_len=4))
    keys = extend_keys(duo.prefill.config.seed_of(Namespace("")), pack_u32(HEAD), 4)
    assert [len(tier) for tier in tiering(duo).tiers] == [4] * num_pools
    tiering(duo).tiers[-1].forget([key_at(keys, 3)])
    before = computed(duo)
    duo.serve([*HEAD, 51, 52], 3)
    assert computed(duo) - before == 4 + 2
    assert duo.metrics(PREFILL)["deltaserve_tier_tokens_loaded_total"] == 12
    rest(duo)


# ---------------------------------------------------------------- what the rule of near.py sees of it


def learns(duo: Duo, load_s: float) -> None:
    """Decode has loaded a page of 64 bytes in so many seconds, and computed prompts at a millisecond a token."""
    tiering(duo, DECODE)._price.learn(64, load_s)
    duo.decode.parts.scheduler.running.step_target.learn(0, 100, 0.1)


def loadable(duo: Duo, prompt: list[int]) -> Loadable | None:
    asked = duo.ask(prompt, 3)
    duo.until(lambda: duo.decode_room(asked) is not None)
    room = duo.decode_room(asked)
    assert room is not None
    parts = duo.decode.parts
    match = parts.cache.match(room.request.namespace, room.request.tokens, room.request.keys)
    return tiering(duo, DECODE).loadable(room.request, match)


def test_it_is_told_what_a_load_would_bring_and_take() -> None:
    duo = with_evicted_head()
    assert loadable(duo, [*HEAD, 51, 52]) is None, "nobody knows what a load takes"
    duo = with_evicted_head()
    learns(duo, 0.001)
    found = loadable(duo, [*HEAD, 51, 52])
    assert found is not None
    assert found.num_tokens == 16
    assert found.load_s == pytest.approx(0.002 + 4 * 0.001)
    assert loadable(duo, [70, *HEAD, 51, 52]) is None


@pytest.mark.parametrize(("load_s", "num_offers"), [(0.001, 0), (0.1, 1)])
def test_a_prompt_that_lies_in_decodes_file_is_decodes_where_loading_is_sooner(load_s: float, num_offers: int) -> None:
    """16 of its 18 tokens are there: two are computed, as many as --decode-extend-tokens."""
    duo = with_evicted_head(replace(SMALL, extend_len=2))
    learns(duo, load_s)
    duo.weigh(9)
    before = len(duo.sent(Offer, DECODE))
    asked = duo.serve([*HEAD, 51, 52], 3)
    assert len(duo.sent(Offer, DECODE)) - before == num_offers
    assert asked.usage.weighed is not None
    assert asked.usage.weighed.local_wait_len == (18 if num_offers else 2 + 6)
    if num_offers:
        assert duo.sent(Offer, DECODE)[-1].held_len == 0, "what lies in a file cannot be pulled"
    else:
        assert (asked.usage.decode_cached_len, asked.usage.decode_loaded_len) == (16, 16)


@pytest.mark.parametrize(("byte_s", "loaded_len"), [(1e-6, 0), (1.0, 16)])
def test_decode_loads_what_prefill_would_take_longer_to_send(byte_s: float, loaded_len: int) -> None:
    """As the last hand-overs took; a load takes 6 ms."""
    duo = with_evicted_head()
    learns(duo, 0.001)
    price = duo.decode.intake._ways[PREFILL] = WayPrice()
    for _ in range(8):
        price.learn(1000, 1000 * byte_s, duo.world.now)
        price.learn(0, 0.0, duo.world.now)
    asked = duo.serve([*HEAD, 51, 52], 3)
    assert (asked.usage.decode_loaded_len, asked.usage.decode_cached_len) == (loaded_len, loaded_len)


def resident(duo: Duo, name: PeerName = PREFILL) -> int:
    """Pages that the front takes to be there."""
    duo.run(1.0)
    return duo.cluster.front.core.placer.residency.num_resident(name)


def test_routers_know_of_what_the_file_holds() -> None:
    duo = with_evicted_head()
    assert duo.cached_pages(PREFILL) == 0
    assert resident(duo) == 4
    keys = extend_keys(duo.prefill.config.seed_of(Namespace("")), pack_u32(HEAD), 4)
    tiering(duo).tiers[0].forget([key_at(keys, 3)])
    assert resident(duo) == 3
    duo.cluster.front.tell(FlushAsked())
    assert resident(duo) == 0


def test_a_front_that_comes_later_hears_of_the_file_too() -> None:
    duo = with_evicted_head()
    snapshot = duo.prefill.parts.cache.snapshot()
    assert len(snapshot.stored) == 4 * KEY_BYTES
