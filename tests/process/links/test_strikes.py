"""Which links are ignored, and for how long."""

from deltaserve.process.links.strikes import Strikes
from tests.process.links.frames import Hands


def test_the_third_strike_within_the_window_counts() -> None:
    clock = Hands()
    strikes = Strikes(100, clock)
    assert [strikes.add("a") for _ in range(3)] == [False, False, True]
    assert strikes.is_ignored("a")
    assert not strikes.is_ignored("b")


def test_strikes_far_apart_do_not_add_up() -> None:
    clock = Hands()
    strikes = Strikes(100, clock)
    for at in (0.0, 31.0, 62.0, 93.0):
        clock.at = at
        assert not strikes.add("a")
    assert not strikes.is_ignored("a")


def test_a_link_is_heard_again_after_a_window() -> None:
    clock = Hands()
    strikes = Strikes(100, clock)
    for _ in range(3):
        strikes.add(b"connection")
    clock.at = 60.0
    assert strikes.is_ignored(b"connection")
    clock.at = 60.1
    assert not strikes.is_ignored(b"connection")
    assert not strikes.add(b"connection")


def test_only_so_many_links_are_remembered() -> None:
    strikes = Strikes(2, Hands())
    for key in ("a", "b", "c"):
        for _ in range(3):
            strikes.add(key)
    assert [strikes.is_ignored(key) for key in ("a", "b", "c")] == [False, True, True]
