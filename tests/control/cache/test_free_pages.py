"""FreePages against a set, and how few runs it hands out."""

import random

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.cache.free_pages import FreePages


def taken(free: FreePages, n: int) -> list[int]:
    found = free.take(n)
    assert found is not None
    return [page for first, end in found for page in range(first, end)]


@given(st.integers(0, 300), st.lists(st.tuples(st.integers(0, 90), st.integers(0, 2**32)), max_size=60))
def test_no_page_is_lost_or_handed_out_twice(num_pages: int, steps: list[tuple[int, int]]) -> None:
    """Takes of any length, single pages, and returns of any part in any order."""
    free, there, out = FreePages(num_pages), set(range(num_pages)), list[int]()
    for n, seed in steps:
        chance = random.Random(seed)
        if seed % 3 == 0:
            chance.shuffle(out)
            back, out = out[:n], out[n:]
            free.give_back(back)
            there |= set(back)
        elif n > len(there):
            assert free.take(n) is None
        else:
            pages = taken(free, n)
            assert pages == sorted(set(pages) & there)
            assert len(pages) == n
            there -= set(pages)
            out += pages
        if seed % 5 == 0:
            page = free.take_one()
            assert (page is None) == (not there)
            if page is not None:
                there.remove(page)
                out.append(page)
        assert sorted(free) == sorted(there)
        assert len(free) == len(there)


def test_many_pages_come_from_the_shortest_run_that_holds_them() -> None:
    free = FreePages(100)
    taken(free, 100)
    free.give_back([*range(50, 90), 3, 2, *range(10, 22)])
    assert taken(free, 12) == list(range(10, 22))
    assert taken(free, 30) == list(range(50, 80))


def test_without_such_a_run_they_come_from_the_longest() -> None:
    free = FreePages(100)
    taken(free, 100)
    free.give_back([0, 2, 4, 6, *range(10, 30), *range(40, 50), *range(60, 63)])
    assert taken(free, 32) == [*range(10, 30), *range(40, 50), 60, 61]


def test_single_pages_break_no_long_run() -> None:
    free = FreePages(100)
    taken(free, 100)
    free.give_back([*range(10, 30), 0, 5, 7])
    assert {free.take_one() for _ in range(3)} == {0, 5, 7}
    assert taken(free, 20) == list(range(10, 30))
    assert free.take_one() is None
    assert free.take(0) == []


def test_what_comes_back_in_pieces_is_one_run_again() -> None:
    free = FreePages(1000)
    pages = taken(free, 1000)
    random.Random(0).shuffle(pages)
    free.give_back(pages[:500])
    free.take_one()
    free.give_back([*pages[500:], *(set(pages[:500]) - set(free))])
    assert list(taken(free, 1000)) == list(range(1000))
