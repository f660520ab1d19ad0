"""Which pair is chosen, and that the choice depends on nothing but what is handed in."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product

import pytest

from deltaserve.control.front.balance import POLICIES, Choosable, LowestTtft, RoundRobin
from deltaserve.control.front.estimate import Candidate, Computing, Keeping, Prices
from deltaserve.control.front.load import DecodeLoad, PrefillLoad
from deltaserve.core.ids import PeerName

PRICES = Prices(kv_bytes_per_token=131072, transfer_bytes_per_s=4e9)
PROMPT = 8000


def prefill(name: str, queue_tokens: float = 0.0) -> PrefillLoad:
    return PrefillLoad(PeerName(name), queue_tokens, 8000.0)


def decode(name: str, num_rooms: float = 0.0) -> DecodeLoad:
    return DecodeLoad(PeerName(name), num_rooms, 64, 0.0, 1e6, 1_000_000, 0.02, 256.0)


def workers(
    prefills: list[PrefillLoad],
    decodes: list[DecodeLoad],
    hits: dict[str, int] | None = None,
    unified: Sequence[str] = (),
) -> Choosable:
    held = hits or {}
    computing = [Computing(p, held.get(p.worker, 0)) for p in prefills]
    keeping = [Keeping(d, held.get(d.worker, 0)) for d in decodes]
    alone = [
        Candidate(Computing(prefill(name), held.get(name, 0)), Keeping(decode(name), held.get(name, 0)))
        for name in unified
    ]
    return Choosable(computing, keeping, alone)


def names(pair: Candidate) -> tuple[str, str]:
    return pair.computing.load.worker, pair.keeping.load.worker


def chosen(among: Choosable) -> tuple[str, str]:
    return names(LowestTtft().choose(PROMPT, [among], PRICES).pair)


def test_the_prefix_is_followed_on_both_sides() -> None:
    hits = {"p1": 6400, "d1": 6400}
    assert chosen(workers([prefill("p0"), prefill("p1")], [decode("d0"), decode("d1")], hits)) == ("p1", "d1")


def test_a_short_queue_does_not_drive_a_prompt_away_from_its_prefix_but_a_long_one_does() -> None:
    for queue_tokens, expected in ((3000.0, "p1"), (9000.0, "p0")):
        busy = [prefill("p0"), prefill("p1", queue_tokens)]
        assert chosen(workers(busy, [decode("d0")], {"p1": 6400}))[0] == expected


def test_a_worker_above_the_mean_competes_as_if_cold() -> None:
    """40 rooms against 8: the hot decode worker's residency does not count, though its pages would save wire time."""
    candidates = workers([prefill("p0")], [decode("d0", 40.0), decode("d1", 8.0)], {"d0": 8000})
    assert chosen(candidates) == ("p0", "d1")


def test_a_lone_conversation_stays_where_its_prefix_is() -> None:
    """One room against none is above the mean too, and says nothing."""
    candidates = workers([prefill("p0")], [decode("d0"), decode("d1", 1.0)], {"d1": 6400})
    assert chosen(candidates) == ("p0", "d1")


def test_ties_go_to_the_least_load_then_to_the_first_name_in_any_order() -> None:
    candidates = workers([prefill("p1"), prefill("p0")], [decode("d1", 1.0), decode("d2"), decode("d0", 1.0)])
    assert chosen(candidates) == ("p0", "d2")
    for computing, keeping in product(permutations(("p0", "p1", "p2")), permutations(("d0", "d1"))):
        among = workers([prefill(name) for name in computing], [decode(name) for name in keeping])
        assert chosen(among) == ("p0", "d0")


def test_the_best_pair_is_the_best_of_each_side() -> None:
    """Against every pair priced by itself."""
    draw = random.Random(1)
    for _ in range(200):
        prefills = [prefill(f"p{i}", draw.randrange(0, 12000, 1000)) for i in range(4)]
        decodes = [decode(f"d{i}", float(draw.randrange(80))) for i in range(3)]
        hits = {name: draw.randrange(0, PROMPT, 800) for name in ("p0", "p2", "d1", "d2")}
        among = workers(prefills, decodes, hits)
        best = LowestTtft().choose(PROMPT, [among], PRICES)
        each = [
            LowestTtft().choose(PROMPT, [replace(among, unified=[Candidate(c, k)], computing=[], keeping=[])], PRICES)
            for c, k in product(among.computing, among.keeping)
        ]
        assert names(best.pair) in {names(choice.pair) for choice in each}


@pytest.mark.parametrize(("hits", "expected"), [({}, "u0"), ({"p0": 6400, "d0": 6400}, "p0")])
def test_a_unified_worker_competes_with_the_best_pair(hits: dict[str, int], expected: str) -> None:
    """It moves nothing; a prefix elsewhere saves more."""
    assert chosen(workers([prefill("p0")], [decode("d0")], hits, unified=["u0"]))[0] == expected


def test_a_burst_of_one_prefix_stays_with_the_worker_that_computes_it() -> None:
    """Its queue is this very prefix: to wait for it costs nobody anything, to compute it twice does."""
    among = workers([prefill("p0", 20_000.0), prefill("p1")], [decode("d0")], {"p0": 19_000})
    assert names(LowestTtft().choose(20_000, [among], PRICES).pair)[0] == "p0"


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (4, 2)])
def test_round_robin_gives_every_pair_its_turn(num_prefill: int, num_decode: int) -> None:
    policy = RoundRobin()
    prefills = [prefill(f"p{i}", 1e6 * i) for i in range(num_prefill)]
    candidates = workers(prefills, [decode(f"d{i}", 30.0 * i) for i in range(num_decode)], {"p0": 8000, "d0": 8000})
    num_pairs = num_prefill * num_decode
    turns = [names(policy.choose(PROMPT, [candidates], PRICES).pair) for _ in range(3 * num_pairs)]
    counts = Counter(turns)
    assert set(counts.values()) == {3} and len(counts) == num_pairs
    # No worker has two turns more than another at any time.
    for i in range(len(turns)):
        seen = Counter(keeping for _, keeping in turns[: i + 1])
        assert max(seen.values()) - min(seen[f"d{n}"] for n in range(num_decode)) <= 1


def test_round_robin_gives_unified_workers_their_turn_too() -> None:
    policy, among = RoundRobin(), workers([prefill("p0")], [decode("d0")], unified=["u0", "u1"])
    turns = [names(policy.choose(PROMPT, [among], PRICES).pair) for _ in range(3)]
    assert turns == [("p0", "d0"), ("u0", "u0"), ("u1", "u1")]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_single_candidate(name: str) -> None:
    only = workers([prefill("p0", 1e9)], [decode("d0", 1e6)])
    assert names(POLICIES[name]().choose(PROMPT, [only], PRICES).pair) == ("p0", "d0")


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_pairs_two_pools(name: str) -> None:
    """Whatever would be cheapest: the best half of one is no half of another."""
    policy, draw = POLICIES[name](), random.Random(2)
    for _ in range(200):
        hits = {each: draw.randrange(0, PROMPT, 800) for each in ("p0", "p1", "d0", "d1", "d2")}
        loads = [float(draw.randrange(80)) for _ in range(5)]
        old = workers([prefill("p0", 100 * loads[0])], [decode("d0", loads[1]), decode("d2", loads[2])], hits)
        new = workers([prefill("p1", 100 * loads[3])], [decode("d1", loads[4])], hits)
        assert names(policy.choose(PROMPT, [old, new], PRICES).pair) in {("p0", "d0"), ("p0", "d2"), ("p1", "d1")}


def test_the_pool_that_holds_the_prefix_is_preferred_until_it_is_full() -> None:
    for queue, expected in ((0.0, "p1"), (1e6, "p0")):
        old = workers([prefill("p0")], [decode("d0")])
        new = workers([prefill("p1", queue)], [decode("d1")], {"p1": 6400, "d1": 6400})
        assert names(LowestTtft().choose(PROMPT, [old, new], PRICES).pair)[0] == expected


def test_round_robin_takes_the_decode_workers_of_all_pools_in_turn() -> None:
    policy = RoundRobin()
    old = workers([prefill("p0"), prefill("p2")], [decode("d0")])
    new = workers([prefill("p1")], [decode("d1")])
    turns = [names(policy.choose(PROMPT, [old, new], PRICES).pair) for _ in range(4)]
    assert turns == [("p0", "d0"), ("p1", "d1"), ("p2", "d0"), ("p1", "d1")]


def test_a_member_of_a_group_keeps_its_conversations_and_is_left_when_it_is_full_of_them() -> None:
    """Where moving a prompt costs next to nothing, too: elsewhere the fewer rooms decide."""
    cheap = Prices(kv_bytes_per_token=1, transfer_bytes_per_s=4e9)
    for is_in_group, rooms, expected in ((True, 5.0, "d1"), (True, 20.0, "d0"), (False, 5.0, "d0")):
        sides = [replace(decode(name, count), is_in_group=is_in_group) for name, count in (("d0", 3.0), ("d1", rooms))]
        pair = LowestTtft().choose(PROMPT, [workers([prefill("p0")], sides, {"d1": 6400})], cheap).pair
        assert names(pair)[1] == expected
