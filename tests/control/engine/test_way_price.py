"""What a way takes; bytes of the way back against tokens that are not computed again."""

import pytest

from deltaserve.control.engine.way_price import Way, WayPrice, WaySize

TOKENS_PER_S = 10_000.0
MIB = 1 << 20


def learnt(num_bytes: int, seconds: float) -> WayPrice:
    price = WayPrice()
    for _ in range(8):
        price.learn(num_bytes, seconds, 0.0)
    return price


def test_unknown_bytes_and_an_unknown_rate_cost_nothing() -> None:
    assert WayPrice().is_worth(WaySize(1 << 40, 1), 1.0, TOKENS_PER_S)
    assert learnt(MIB, 10.0).is_worth(WaySize(MIB, 1), 1.0, 0.0)


@pytest.mark.parametrize(
    ("num_tokens", "chance", "is_worth"),
    [(2000, 1.0, True), (500, 1.0, False), (2000, 0.8, True), (2000, 0.3, False)],
)
def test_a_slow_link_takes_what_is_dear_to_compute_and_likely_asked_for(
    num_tokens: int, chance: float, is_worth: bool
) -> None:
    """A megabyte in a tenth of a second."""
    assert learnt(MIB, 0.12).is_worth(WaySize(MIB, num_tokens), chance, TOKENS_PER_S) is is_worth


def test_turns_of_the_engines_are_no_price_of_bytes() -> None:
    assert learnt(4096, 0.015).is_worth(WaySize(1 << 30, 1), 1.0, TOKENS_PER_S)


def test_a_quarter_of_quick_ones_is_believed() -> None:
    price = learnt(MIB, 0.02)
    for _ in range(16):
        price.learn(MIB, 30.0, 0.0)
    assert price.is_worth(WaySize(MIB, 1), 1.0, TOKENS_PER_S)


def test_where_no_next_turn_comes_nothing_is_worth_it() -> None:
    assert not WayPrice().is_worth(WaySize(1, 1 << 20), 0.01, TOKENS_PER_S)


def test_a_link_that_was_slow_once_is_tried_again() -> None:
    price = learnt(MIB, 1.02)
    tried = [price.is_worth(WaySize(MIB, 2000), 1.0, TOKENS_PER_S) for _ in range(40)]
    assert not tried[0] and tried[-1]
    price.learn(MIB, 1.02, 0.0)
    assert not price.is_worth(WaySize(MIB, 2000), 1.0, TOKENS_PER_S), "and found slow again"


def test_a_prompt_waits_for_what_is_sooner_here_than_computed() -> None:
    size = WaySize(MIB, 2000)
    assert learnt(MIB, 0.12).is_sooner(size, TOKENS_PER_S)
    assert not learnt(MIB, 0.3).is_sooner(size, TOKENS_PER_S)
    assert learnt(MIB, 0.3).is_sooner(size, 0.0), "nobody knows what computing takes"
    assert WayPrice().is_sooner(size, TOKENS_PER_S)


def test_a_prompt_waits_for_turns_of_the_engines_too() -> None:
    quick = learnt(4096, 0.015)
    assert quick.is_sooner(WaySize(4096, 200), TOKENS_PER_S)
    assert not quick.is_sooner(WaySize(4096, 100), TOKENS_PER_S)


def test_a_trip_and_bytes_are_told_apart_where_sizes_differ() -> None:
    """2 ms, and 165 MB/s."""
    price = WayPrice()
    for num_bytes in (1 << 12, 1 << 22, 0, 1 << 26) * 4:
        price.learn(num_bytes, 0.002 + num_bytes / 165e6, 0.0)
    assert price.way is not None
    assert price.way.trip_s == pytest.approx(0.002, rel=0.02)
    assert price.way.byte_s == pytest.approx(1 / 165e6, rel=0.02)


def test_too_few_ways_and_ways_without_bytes_tell_nothing_of_bytes() -> None:
    price = WayPrice()
    for _ in range(3):
        price.learn(0, 0.004, 0.0)
    assert price.way is None
    price.learn(0, -1.0, 0.0)
    assert price.way == Way(0.0, None)


def test_a_stall_is_no_price() -> None:
    """Nor are six of sixteen."""
    price = WayPrice()
    for _ in range(10):
        price.learn(MIB, 0.011, 0.0)
    for _ in range(6):
        price.learn(MIB, 5.0, 0.0)
    assert price.way == Way(0.011, 0.0)


def test_an_old_price_that_keeps_prompts_away_is_believed_less_and_less() -> None:
    price = learnt(MIB, 1.02)
    for _ in range(50):
        price.passed_over(9.0)
    slow = price.way
    for _ in range(50):
        price.passed_over(11.0)
    assert slow is not None and slow.byte_s == pytest.approx(1 / MIB)
    assert price.way is not None and price.way.byte_s is not None and price.way.byte_s < 0.01 / MIB
    price.learn(MIB, 1.02, 12.0)
    assert price.way == slow
