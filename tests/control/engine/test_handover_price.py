"""What a hand-over takes, as decode measures it: told to the front, believed instead of what is assumed."""

from dataclasses import replace

import pytest

from deltaserve.control.engine.way_price import Way
from deltaserve.core.wire.messages import Grant, Offer, Status, Submit
from deltaserve.sim.cluster import Shape
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo

BYTE_S = 1e-4
SHAPE = Shape(prefill_pages=200, decode_pages=200)


def by_bytes(seconds: float) -> Fabric:
    """Every byte takes so long."""

    def fate(posted: Posted) -> Fate:
        took = posted.num_bytes * seconds
        return Fate(lands=(Part(took),), notified_s=took, told_s=took)

    return Fabric(policy=fate)


def measured(duo: Duo) -> Way:
    for number in range(8):
        duo.serve([60 + number, *range(1, 60 if number % 2 else 9)], 2)
    way = duo.decode.intake.way_from(PREFILL)
    assert way is not None
    return way


@pytest.mark.parametrize("ahead_s", [-5e4, 0.0, 1e6])
def test_a_trip_and_what_bytes_take_whatever_prefills_clock_shows(ahead_s: float) -> None:
    """Two posts are under way at a time."""
    duo = Duo(SHAPE, fabric=by_bytes(BYTE_S))
    duo.run(0.5)
    duo.worker(PREFILL).pace.clock_s = ahead_s
    duo.run(15.0)
    way = measured(duo)
    assert way.trip_s == pytest.approx(0.02)
    assert way.byte_s == pytest.approx(BYTE_S / 2, rel=0.2)


def test_neither_computing_nor_what_was_sent_meanwhile_is_part_of_it() -> None:
    """A step takes 0.2 s: when the token is drawn, the last page alone is still to come."""
    duo = Duo(SHAPE, fabric=by_bytes(BYTE_S))
    duo.worker(PREFILL).pace.slowness = 200.0
    way = measured(duo)
    assert way.trip_s == pytest.approx(0.009, rel=0.1)
    assert way.byte_s == pytest.approx(0.0, abs=1e-9)


def test_it_is_told_to_the_front_once_it_is_known() -> None:
    duo = Duo(SHAPE, fabric=by_bytes(BYTE_S))
    duo.run(1.0)
    assert {(status.handover_s, status.byte_s) for status in duo.sent(Status, DECODE)} == {(None, None)}
    way = measured(duo)
    duo.run(1.0)
    told = duo.sent(Status, DECODE)[-1]
    assert (told.handover_s, told.byte_s) == (way.trip_s, way.byte_s)
    assert duo.sent(Status, PREFILL)[-1].handover_s is None


def test_a_grant_that_waits_for_memory_teaches_nothing() -> None:
    duo = Duo(SHAPE)
    way = measured(duo)
    pool = duo.worker(DECODE).instance.parts.pools[0]
    taken = pool.allocate(pool.num_free)
    assert taken is not None
    duo.flush(DECODE)
    more = pool.allocate(pool.num_free)
    asked = duo.ask(range(1, 60), 2)
    duo.world.run(until=duo.world.now + 3.0)
    assert not any(grant.room == asked.room for grant in duo.sent(Grant, DECODE))
    pool.free([*taken, *(more or ())])
    before = len(duo.decode.intake._ways[PREFILL]._ways)
    duo.until(lambda: bool(asked.answer.ends))
    assert asked.answer.error is None
    assert len(duo.decode.intake._ways[PREFILL]._ways) == before
    assert duo.decode.intake.way_from(PREFILL) == way


def test_decode_is_told_what_prefill_measured() -> None:
    duo = Duo(replace(SHAPE, itl_target_s=1.0, conditional_prefill=True))
    duo.serve(range(1, 9), 2)
    assert duo.sent(Submit, FRONT)[-1].prefill_tokens_per_s is None
    for number in range(12):
        duo.serve([60 + number, *range(1, 40)], 2)
    duo.run(1.0)
    duo.serve(range(1, 9), 2)
    assert duo.sent(Submit, FRONT)[-1].prefill_tokens_per_s == pytest.approx(1000.0, rel=0.1)
    assert duo.sent(Offer, DECODE)
