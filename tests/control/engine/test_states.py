"""Prefill and decode with full attention, a window and recurrent states: of the states only the last one moves."""

import pytest

from deltaserve.core.tokens import token_len
from deltaserve.core.wire.messages import Grant
from deltaserve.sim.cluster import Shape
from deltaserve.sim.rank_memory import STAMP_BYTES
from tests.control.engine.duo import DECODE, FIRST_TOKEN, Duo

SHAPE = Shape(num_pools=3, window_len=9)
PAGE_BYTES = 4 * STAMP_BYTES


def granted(duo: Duo) -> list[tuple[int, int]]:
    """What the last grant covers, per pool: first page index, pages."""
    return [(c.first, token_len(c.pages)) for c in duo.sent(Grant, DECODE)[-1].coverage]


@pytest.mark.parametrize(("prompt_len", "last"), [(1, 0), (4, 0), (5, 1), (40, 9), (41, 10)])
def test_one_state_moves(prompt_len: int, last: int) -> None:
    duo = Duo(SHAPE)
    duo.serve([i % 90 for i in range(prompt_len)], 9)
    full, window, state = granted(duo)
    assert (full, state) == ((0, last + 1), (last, 1))
    landed = duo.decode.metrics()["deltaserve_transfer_bytes_landed_total"]
    assert landed == (full[1] + window[1] + 1) * PAGE_BYTES


@pytest.mark.parametrize("num_states", [0, 1000], ids=["with its own states", "with its states evicted"])
def test_the_last_state_always_comes_from_prefill(num_states: int) -> None:
    """So decode matches KV alone, whatever states it has."""
    duo = Duo(SHAPE)
    duo.serve(list(range(40)), 9)
    duo.decode.parts.cache.evict((0, 0, num_states))
    asked = duo.serve(list(range(40)), 9)
    assert granted(duo) == [(10, 0), (10, 0), (9, 1)]
    assert asked.usage.decode_cached_len == 40


def test_prefill_goes_on_from_where_a_state_is_worth_keeping() -> None:
    duo = Duo(SHAPE)
    duo.serve(list(range(41)), 1)
    assert duo.serve([*range(41), 50, 51], 3).usage.prefill_cached_len == 40, "before its last token"
    assert duo.serve([*range(38), 50, 51], 3).usage.prefill_cached_len == 0, "nobody knew that they part"
    assert duo.serve([*range(38), 60, 61], 3).usage.prefill_cached_len == 36, "where they part"
    duo.prefill.parts.cache.evict((0, 0, 1000))
    assert duo.serve([*range(41), 60], 3).usage.prefill_cached_len == 0


def test_many_prompts_share_a_few_slots() -> None:
    duo = Duo(Shape(num_pools=3, spare_pages=1, prefill_pages=200, decode_pages=200))
    duo.settle(*[duo.ask([i, *range(30 + 5 * i)], 20) for i in range(6)])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_pools=3, spare_pages=1, prefill_pages=900, decode_pages=900),
        Shape(num_pools=3, spare_pages=300, prefill_pages=50, decode_pages=50),
        Shape(num_pools=3, spare_pages=1, prefill_pages=50, decode_pages=50, extend_len=0),
    ],
    ids=["three slots", "few pages", "few of both"],
)
def test_each_pool_full_while_the_other_is_free_ends_without_an_error(shape: Shape) -> None:
    duo = Duo(shape)
    assert duo.decode.config.num_pages[2] == 2 + (shape.spare_pages or 0)
    asked = [duo.ask([i % 7, *range(10 + i % 9)], 3 + i % 4) for i in range(64)]
    duo.world.run(until=duo.world.now + 60.0, done=lambda: all(a.answer.ends for a in asked))
    duo.settle(*asked)


def test_usage_tells_states_from_pages() -> None:
    duo = Duo(SHAPE)
    asked = duo.serve(list(range(41)), 3)
    full, window, state = granted(duo)
    assert asked.usage.transferred_state_bytes == PAGE_BYTES == state[1] * PAGE_BYTES
    payload = asked.usage.transferred_bytes - (full[1] + window[1] + 1) * PAGE_BYTES
    again = duo.serve(list(range(41)), 3)
    assert again.usage.transferred_state_bytes == PAGE_BYTES
    assert payload in FIRST_TOKEN
    assert again.usage.transferred_bytes - (1 + 1 + 1) * PAGE_BYTES in FIRST_TOKEN
