"""Where decode has to compute with recurrent states: from one of its own if that is near, else prefill computes."""

import pytest

from deltaserve.core.wire.messages import Offer, Starting
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, Asked, Duo

NEAR = 8
"""Tokens that decode computes itself: the grid of checkpoints is 4."""


def through_prefill(duo: Duo, asked: Asked) -> int:
    return len({s.attempt for s in duo.sent(Starting) if s.room == asked.room})


@pytest.mark.parametrize("grid_len", [4, 64], ids=["near", "far"])
def test_a_retracted_row_goes_on_from_the_last_state_that_it_passed(grid_len: int) -> None:
    shape = Shape(num_pools=3, decode_pages=16, reserve_len=0, extend_len=NEAR, state_chunk_len=grid_len)
    duo = Duo(shape)
    first = duo.ask([80, *range(1, 20)], 30)
    duo.run(0.001)  # rows that are in step need memory at once: the state that one passed is taken with its pages
    asked = [first, duo.ask([81, *range(1, 20)], 30)]
    duo.settle(*asked)
    resumed = [a for a in asked if a.usage.num_retractions]
    assert resumed
    for one in resumed:
        assert through_prefill(duo, one) == (1 if grid_len < NEAR else 1 + one.usage.num_retractions)


@pytest.mark.parametrize(("num_evicted", "num_offers"), [(0, 0), (1000, 1)], ids=["its state is there", "it has gone"])
def test_the_next_turn_is_computed_on_decode_from_where_the_answer_ended(num_evicted: int, num_offers: int) -> None:
    duo = Duo(Shape(num_pools=3, extend_len=NEAR))
    asked = duo.serve(list(range(1, 17)), 9)
    duo.weigh(50)
    duo.decode.parts.cache.evict((0, 0, num_evicted))
    before = len(duo.sent(Offer, DECODE))
    duo.serve([*range(1, 17), *asked.expected, 90, 91], 3)
    assert len(duo.sent(Offer, DECODE)) - before == num_offers
