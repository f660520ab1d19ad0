"""Bytes of the way back against tokens that are not computed again."""

import pytest

from deltaserve.control.engine.back_price import BackPrice, WaySize

TOKENS_PER_S = 10_000.0
MIB = 1 << 20


def learnt(num_bytes: int, seconds: float) -> BackPrice:
    price = BackPrice()
    for _ in range(8):
        price.learn(num_bytes, seconds)
    return price


def test_unknown_bytes_and_an_unknown_rate_cost_nothing() -> None:
    assert BackPrice().is_worth(WaySize(1 << 40, 1), 1.0, TOKENS_PER_S)
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
        price.learn(MIB, 30.0)
    assert price.is_worth(WaySize(MIB, 1), 1.0, TOKENS_PER_S)


def test_where_no_next_turn_comes_nothing_is_worth_it() -> None:
    assert not BackPrice().is_worth(WaySize(1, 1 << 20), 0.01, TOKENS_PER_S)


def test_a_link_that_was_slow_once_is_tried_again() -> None:
    price = learnt(MIB, 1.02)
    tried = [price.is_worth(WaySize(MIB, 2000), 1.0, TOKENS_PER_S) for _ in range(40)]
    assert not tried[0] and tried[-1]
    price.learn(MIB, 1.02)
    assert not price.is_worth(WaySize(MIB, 2000), 1.0, TOKENS_PER_S), "and found slow again"


def test_a_prompt_waits_for_what_is_sooner_here_than_computed() -> None:
    size = WaySize(MIB, 2000)
    assert learnt(MIB, 0.12).is_sooner(size, TOKENS_PER_S)
    assert not learnt(MIB, 0.3).is_sooner(size, TOKENS_PER_S)
    assert learnt(MIB, 0.3).is_sooner(size, 0.0), "nobody knows what computing takes"
    assert BackPrice().is_sooner(size, TOKENS_PER_S)


def test_a_prompt_waits_for_turns_of_the_engines_too() -> None:
    quick = learnt(4096, 0.015)
    assert quick.is_sooner(WaySize(4096, 200), TOKENS_PER_S)
    assert not quick.is_sooner(WaySize(4096, 100), TOKENS_PER_S)
