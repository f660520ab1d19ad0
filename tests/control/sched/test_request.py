"""A request's arithmetic: tokens, pages over lease and owned ones, keys that grow with the output."""

from dataclasses import replace

import pytest

from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.keys import extend_keys, seed_key
from deltaserve.core.tokens import pack_u32
from tests.control.cache.toys import ALICE, Toy
from tests.control.sched.toys import make_request, taken_pages

SEED = seed_key(b"secret", "model", 4, ALICE)


def test_lengths_follow_the_tokens() -> None:
    request = make_request(range(5), max_tokens=3)
    assert (request.num_tokens, request.prompt_len, request.output_len, request.max_len) == (5, 5, 0, 8)
    request.append(77)
    assert (request.num_tokens, request.output_len) == (6, 1)
    assert bytes(request.tokens) == pack_u32([0, 1, 2, 3, 4, 77])


def test_truncate_forgets_tokens_and_what_was_computed_of_them() -> None:
    request = make_request(range(6), max_tokens=3)
    request.num_computed = request.num_finite = 6
    request.truncate(4)
    assert (request.num_tokens, request.num_computed, request.num_finite) == (4, 4, 4)
    request.num_computed = request.num_finite = 2
    request.truncate(3)
    assert (request.num_tokens, request.num_computed, request.num_finite) == (3, 2, 2)


@pytest.mark.parametrize("pool", [0, 1])
def test_pages_run_over_the_lease_into_the_owned_ones(pool: int) -> None:
    toy = Toy()
    lease = toy.hold("abc")
    owned = toy.allocate(2)
    request = make_request(range(20), max_tokens=1)
    request.lease = lease
    request.own(taken_pages(owned), (3, 3))
    every = (*lease.pages(pool), *owned[pool])
    assert request.num_pages == 5
    for first in range(6):
        for end in range(first, 6):
            assert request.pages(PoolId(pool), first, end) == every[first:end]
    toy.cache.release(lease)


def test_pages_without_a_lease_are_the_owned_ones() -> None:
    request = make_request(range(8), max_tokens=1)
    assert request.num_pages == 0
    request.own(([PageId(4), PageId(9)],), (0,))
    assert (request.num_pages, request.pages(PoolId(0), 0, 2)) == (2, (4, 9))


def test_a_window_is_given_up_from_its_head_and_may_begin_anywhere() -> None:
    request = make_request(range(20), max_tokens=1)
    request.own(([PageId(4), PageId(9), PageId(2)], [PageId(7), PageId(8)]), (0, 2))
    full, window = PoolId(0), PoolId(1)
    assert [list(request.spans(pool, 0)) for pool in (full, window)] == [[(0, (4, 9, 2))], [(2, (7, 8))]]
    assert [request.end_page(pool) for pool in (full, window)] == [3, 4]
    assert request.pages(window, 3, 4) == (8,)
    assert request.give_up(window, 3) == [7]
    assert request.give_up(window, 3) == []
    assert [list(request.spans(pool, 1)) for pool in (full, window)] == [[(1, (9, 2))], [(3, (8,))]]
    assert [request.end_page(pool) for pool in (full, window)] == [3, 4]
    assert request.give_up(window, 9) == [8]
    assert request.disown() == ([4, 9, 2], [])
    assert (request.num_pages, request.give_up(full, 3)) == (0, [])


@pytest.mark.parametrize("have", [0, 1, 2, 3])
def test_grown_keys_are_those_of_the_whole_text(have: int) -> None:
    tokens = pack_u32(range(15))
    expected = extend_keys(SEED, tokens, 4)
    request = make_request(range(15), max_tokens=1)
    request.keys = bytearray(expected[: 16 * have])
    for num_pages in (1, 3):
        request.grow_keys(SEED, 4, num_pages)
        assert bytes(request.keys) == expected[: 16 * max(have, num_pages)]


def test_identity_is_the_object() -> None:
    request = make_request(range(3), max_tokens=1)
    duplicate = replace(request)
    assert request != duplicate
    assert len({request, duplicate}) == 2
