"""Which pair is chosen, and that the choice depends on nothing but what is handed in."""

import random
from collections import Counter
from itertools import product

import pytest

from deltaserve.base.ids import PeerName
from deltaserve.routing.balance import POLICIES, LowestTtft, RoundRobin
from deltaserve.routing.estimate import Candidate, Prices
from deltaserve.routing.load import DecodeLoad, PrefillLoad

PRICES = Prices(kv_bytes_per_token=131072, transfer_bytes_per_s=4e9, assumed_output_len=256)
PROMPT = 8000


def prefill(name: str, queue_tokens: float = 0.0) -> PrefillLoad:
    return PrefillLoad(PeerName(name), queue_tokens, 8000.0)


def decode(name: str, num_rooms: float = 0.0) -> DecodeLoad:
    return DecodeLoad(PeerName(name), num_rooms, 64, 0.0, 1e6, 1_000_000, 0.02)


def pairs(
    prefills: list[PrefillLoad], decodes: list[DecodeLoad], hits: dict[str, int] | None = None
) -> list[Candidate]:
    held = hits or {}
    return [Candidate(p, d, held.get(p.worker, 0), held.get(d.worker, 0)) for p, d in product(prefills, decodes)]


def chosen(candidates: list[Candidate]) -> tuple[str, str]:
    pair = LowestTtft().choose(PROMPT, candidates, PRICES).pair
    return pair.prefill.worker, pair.decode.worker


def test_the_prefix_is_followed_on_both_sides() -> None:
    hits = {"p1": 6400, "d1": 6400}
    assert chosen(pairs([prefill("p0"), prefill("p1")], [decode("d0"), decode("d1")], hits)) == ("p1", "d1")


def test_a_short_queue_does_not_drive_a_prompt_away_from_its_prefix_but_a_long_one_does() -> None:
    for queue_tokens, expected in ((3000.0, "p1"), (9000.0, "p0")):
        busy = [prefill("p0"), prefill("p1", queue_tokens)]
        assert chosen(pairs(busy, [decode("d0")], {"p1": 6400}))[0] == expected


def test_a_worker_above_the_mean_competes_as_if_cold() -> None:
    """40 rooms against 8: the hot decode worker's residency does not count, though its pages would save wire time."""
    candidates = pairs([prefill("p0")], [decode("d0", 40.0), decode("d1", 8.0)], {"d0": 8000})
    assert chosen(candidates) == ("p0", "d1")


def test_a_lone_conversation_stays_where_its_prefix_is() -> None:
    """One room against none is above the mean too, and says nothing."""
    candidates = pairs([prefill("p0")], [decode("d0"), decode("d1", 1.0)], {"d1": 6400})
    assert chosen(candidates) == ("p0", "d1")


def test_ties_go_to_the_least_load_then_to_the_first_name_in_any_order() -> None:
    candidates = pairs([prefill("p1"), prefill("p0")], [decode("d1", 1.0), decode("d2"), decode("d0", 1.0)])
    assert chosen(candidates) == ("p0", "d2")
    candidates = pairs([prefill("p1"), prefill("p0")], [decode("d1"), decode("d0")])
    for seed in range(20):
        random.Random(seed).shuffle(candidates)
        assert chosen(candidates) == ("p0", "d0")


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (4, 2)])
def test_round_robin_gives_every_pair_its_turn(num_prefill: int, num_decode: int) -> None:
    policy = RoundRobin()
    prefills = [prefill(f"p{i}", 1e6 * i) for i in range(num_prefill)]
    candidates = pairs(prefills, [decode(f"d{i}", 30.0 * i) for i in range(num_decode)], {"p0": 8000, "d0": 8000})
    turns = [policy.choose(PROMPT, candidates, PRICES).pair for _ in range(3 * len(candidates))]
    counts = Counter((pair.prefill.worker, pair.decode.worker) for pair in turns)
    assert set(counts.values()) == {3} and len(counts) == len(candidates)
    # No worker has two turns more than another at any time.
    for i in range(len(turns)):
        seen = Counter(pair.decode.worker for pair in turns[: i + 1])
        assert max(seen.values()) - min(seen[PeerName(f"d{n}")] for n in range(num_decode)) <= 1


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_a_single_candidate(name: str) -> None:
    only = pairs([prefill("p0", 1e9)], [decode("d0", 1e6)])
    assert POLICIES[name]().choose(PROMPT, only, PRICES).pair is only[0]
