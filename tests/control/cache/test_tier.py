"""Which page of a full file makes room, and when a file is worth reading."""

from math import inf

import pytest

from deltaserve.control.cache.load_price import LoadPrice
from deltaserve.control.cache.newcomers import Newcomers
from deltaserve.control.cache.tier import Tier
from deltaserve.core.ids import PageId
from deltaserve.core.keys import KEY_BYTES


def key(number: int) -> bytes:
    return bytes([number]) * KEY_BYTES


def filled(num_slots: int) -> Tier:
    """Pages 0, 1, ..., stored in this order."""
    tier = Tier(num_slots)
    for number in range(num_slots):
        put(tier, number)
    return tier


def put(tier: Tier, number: int) -> None:
    slot = tier.begin(key(number))
    assert slot is not None
    tier.stored(slot)


def there(tier: Tier, *numbers: int) -> list[int]:
    return [number for number in numbers if key(number) in tier]


def test_the_page_used_least_recently_makes_room() -> None:
    tier = filled(3)
    tier.touch(key(0))
    put(tier, 3)
    assert there(tier, 0, 1, 2, 3) == [0, 2, 3]
    assert tier.num_evicted == 1


def test_of_a_path_the_end_makes_room_first() -> None:
    tier = filled(3)
    tier.use(key(0) + key(1) + key(2), range(1, 3))
    tier.refresh(key(0) + key(1) + key(2), 1)
    put(tier, 3)
    put(tier, 4)
    assert there(tier, 0, 1, 2, 3, 4) == [0, 3, 4]


def test_nothing_makes_room_while_all_is_read_or_written() -> None:
    tier = filled(2)
    tier.pin(tier.use(key(0) + key(1), range(2)))
    assert tier.begin(key(2)) is None
    tier.unpin([0])
    assert tier.begin(key(2)) == 0
    assert tier.begin(key(3)) is None


def test_what_leaves_the_tree_goes_behind_what_stayed_there_unasked_for() -> None:
    tier = filled(3)
    newcomers = Newcomers((tier,), tier.clear)
    newcomers.path_gone(key(0) + key(1))
    put(tier, 3)
    assert there(tier, 0, 1, 2, 3) == [0, 1, 3]


def test_newcomers_are_told_once_and_oldest_first_and_not_when_they_have_left() -> None:
    newcomers = Newcomers((Tier(4), Tier(4)), lambda: None)
    newcomers.stored(0, key(1) + key(2) + key(3), [PageId(11), PageId(12), PageId(13)])
    newcomers.stored(1, key(2) + key(3), [PageId(22), PageId(23)])
    newcomers.gone(0, key(2))
    assert (newcomers.count(0), newcomers.count(1)) == (2, 2)
    newcomers.path_gone(key(3))
    assert (newcomers.count(0), newcomers.count(1)) == (1, 1)
    newcomers.stored(0, key(4), [PageId(14)])
    assert newcomers.take(0, 1) == {key(1): 11}
    assert newcomers.take(0, 9) == {key(4): 14}
    assert newcomers.take(0, 9) == {}
    assert newcomers.take(1, 9) == {key(2): 22}


def test_a_slow_file_is_not_read_and_is_tried_again_some_time() -> None:
    price = LoadPrice()
    assert price.is_worth(1_000_000, 0.1)  # nothing is known
    price.learn(1_000_000, 1.0)
    assert not price.is_worth(1_000_000, 0.1)
    assert price.is_worth(1_000_000, 10.0)
    assert price.is_worth(1_000_000, inf)
    assert any(price.is_worth(1_000_000, 0.1) for _ in range(100))


def test_what_is_had_in_a_moment_is_not_loaded() -> None:
    price = LoadPrice()
    price.learn(1_000_000, 0.001)
    assert not price.is_worth(100, 0.001)
    assert price.is_worth(100, 0.016)


def test_to_ask_what_a_load_takes_changes_no_price() -> None:
    price = LoadPrice()
    assert price.seconds(1_000_000) is None
    price.learn(1_000_000, 1.0)
    assert [price.seconds(1_000_000) for _ in range(100)] == [pytest.approx(1.002)] * 100
