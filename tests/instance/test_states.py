"""Prefill and decode with full attention, a window and recurrent states: of the states only the last one moves."""

import pytest

from deltaserve.base.tokens import token_len
from deltaserve.sim.cluster import Shape
from deltaserve.sim.rank_memory import STAMP_BYTES
from deltaserve.wire.messages import Grant
from tests.instance.duo import DECODE, Duo

SHAPE = Shape(num_pools=3, window_len=9)
PAGE_BYTES = 4 * STAMP_BYTES


def granted(duo: Duo) -> list[tuple[int, int]]:
    """Of the last grant, per pool: first page index, pages."""
    return [(c.first, token_len(c.pages)) for c in duo.sent(Grant, DECODE)[-1].coverage]


@pytest.mark.parametrize(("prompt_len", "last"), [(1, 0), (4, 0), (5, 1), (40, 9), (41, 10)])
def test_one_state_moves(prompt_len: int, last: int) -> None:
    duo = Duo(SHAPE)
    duo.serve([i % 90 for i in range(prompt_len)], 9)
    full, window, state = granted(duo)
    assert (full, state) == ((0, last + 1), (last, 1))
    landed = duo.decode.metrics()["deltaserve_transfer_bytes_landed_total"]
    assert landed == (full[1] + window[1] + 1) * PAGE_BYTES


def test_a_state_that_decode_has_does_not_move() -> None:
    duo = Duo(SHAPE)
    duo.serve(list(range(40)), 1)
    duo.serve(list(range(40)), 9)
    assert granted(duo) == [(10, 0), (10, 0), (10, 0)]


def test_a_state_that_decode_has_no_more_moves_alone() -> None:
    duo = Duo(SHAPE)
    duo.serve(list(range(40)), 1)
    duo.decode.parts.cache.evict((0, 0, 1000))
    asked = duo.serve(list(range(40)), 9)
    assert granted(duo) == [(10, 0), (10, 0), (9, 1)]
    assert asked.usage.decode_cached_len == 40


def test_prefill_goes_on_from_its_last_checkpoint() -> None:
    duo = Duo(SHAPE)
    duo.serve(list(range(41)), 1)
    assert duo.serve([*range(41), 50, 51], 3).usage.prefill_cached_len == 40
    assert duo.serve([*range(38), 50, 51], 3).usage.prefill_cached_len == 32, "a chunk ended there"
    duo.prefill.parts.cache.evict((0, 0, 1000))
    assert duo.serve([*range(41), 60], 3).usage.prefill_cached_len == 0


def test_many_prompts_share_a_few_slots() -> None:
    duo = Duo(Shape(num_pools=3, spare_pages=1, prefill_pages=200, decode_pages=200))
    duo.settle(*[duo.ask([i, *range(30 + 5 * i)], 20) for i in range(6)])
