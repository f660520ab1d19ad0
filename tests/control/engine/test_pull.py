"""Prompts that begin with pages which decode alone has: prefill pulls them before it computes the rest."""

from dataclasses import replace

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import CacheUse, Grant, Offer, Starting, WriteBack
from deltaserve.sim.cluster import Shape
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from tests.control.engine.duo import DECODE, PREFILL, Asked, Duo

SHAPE = Shape(writes_back=True, prefill_pages=60, decode_pages=60)
PAGE = SHAPE.page_size
PROMPT = [*range(1, 6 * PAGE + 2)]
HELD = len(PROMPT) // PAGE * PAGE


def known_to_decode(shape: Shape = SHAPE, fabric: Fabric | None = None) -> Duo:
    """A pair of which decode alone has the prompt's pages, as the front knows."""
    duo = Duo(shape) if fabric is None else Duo(shape, fabric=fabric)
    duo.serve(PROMPT, 2)
    duo.run(0.5)
    duo.flush(PREFILL)
    duo.run(0.5)
    assert duo.cached_pages(PREFILL) == 0
    return duo


def next_turn(duo: Duo, *, cache: CacheUse = CacheUse.NORMAL) -> Asked:
    return duo.ask([*PROMPT, *[50] * PAGE], 2, cache=cache)


def served(duo: Duo, asked: Asked) -> Asked:
    duo.settle(asked)
    return asked


def pulled(duo: Duo) -> float:
    return duo.metrics(PREFILL)["deltaserve_pulls_total"]


@pytest.mark.parametrize("decode_page_size", [PAGE, 6])
def test_prefill_pulls_what_decode_holds_and_computes_the_rest(decode_page_size: int) -> None:
    duo = known_to_decode(replace(SHAPE, decode_page_size=decode_page_size))
    asked = served(duo, next_turn(duo))
    whole = 12 if decode_page_size == 6 else PAGE
    assert duo.sent(Offer, DECODE)[-1].held_len == len(PROMPT) // whole * whole
    assert pulled(duo) == 1
    assert asked.usage.prefill_cached_len == len(PROMPT) // whole * whole
    assert asked.usage.prefill_pulled_len == asked.usage.prefill_cached_len
    assert duo.sent(Starting)[-1].cached_len <= asked.usage.prefill_cached_len


def test_what_prefill_has_itself_is_not_asked_for() -> None:
    duo = Duo(SHAPE)
    duo.serve(PROMPT, 2)
    duo.run(0.5)
    served(duo, next_turn(duo))
    assert (pulled(duo), duo.sent(Offer, DECODE)[-1].held_len) == (0, HELD)


def test_where_it_is_off_everything_is_computed() -> None:
    duo = known_to_decode(replace(SHAPE, writes_back=False))
    asked = served(duo, next_turn(duo))
    assert (pulled(duo), asked.usage.prefill_cached_len) == (0, 0)


def test_what_bypasses_the_caches_pulls_nothing() -> None:
    duo = known_to_decode()
    asked = served(duo, next_turn(duo, cache=CacheUse.BYPASS))
    assert (pulled(duo), asked.usage.prefill_cached_len) == (0, 0)


@pytest.mark.parametrize(("is_flushed", "pull_wait_len", "num_offers"), [(False, 1, 1), (True, 6, 0)])
def test_a_pull_counts_for_what_decode_has_indeed(is_flushed: bool, pull_wait_len: int, num_offers: int) -> None:
    """A front takes a prompt for held where it was placed a moment ago, also when it has been evicted since."""
    duo = Duo(replace(SHAPE, shares_cores=True))
    duo.weigh(100)
    duo.serve(PROMPT, 2)
    duo.run(0.5)
    duo.flush(PREFILL)
    if is_flushed:
        duo.flush(DECODE)
    duo.weigh(100, pull_wait_len)
    before = len(duo.sent(Offer, DECODE))
    asked = duo.serve([*PROMPT, *[50] * PAGE], 2)
    assert len(duo.sent(Offer, DECODE)) - before == num_offers
    assert asked.usage.weighed is not None
    assert asked.usage.weighed.pull_wait_len == pull_wait_len + is_flushed * HELD


def slow_decode(seconds: float) -> Fabric:
    def fate(posted: Posted) -> Fate:
        took = seconds if posted.src == DECODE else 0.001
        return Fate(lands=(Part(took),), notified_s=took, told_s=took)

    return Fabric(policy=fate)


def by_bytes(byte_s: float) -> Fabric:
    def fate(posted: Posted) -> Fate:
        took = 0.0001 + posted.num_bytes * byte_s
        return Fate(lands=(Part(took),), notified_s=took, told_s=took)

    return Fabric(policy=fate)


def test_a_prompt_waits_for_a_second_and_no_longer() -> None:
    duo = known_to_decode(fabric=slow_decode(5.0))
    began = duo.world.now
    asked = next_turn(duo)
    duo.until(lambda: bool(asked.answer.ends))
    assert asked.answer.error is None
    assert 1.0 <= duo.world.now - began < 1.5
    assert (pulled(duo), asked.usage.prefill_cached_len, asked.usage.prefill_pulled_len) == (1, 0, 0)
    duo.quiet(limit_s=20.0)


def test_it_is_not_waited_for_where_computing_is_sooner() -> None:
    """Links of which four ways back were slow; a prompt is computed in milliseconds."""
    duo = Duo(replace(SHAPE, itl_target_s=1.0), fabric=slow_decode(0.8))
    for number in range(30, 45):
        duo.serve([number] * (PAGE + 1), PAGE)
        duo.run(2.0)
    duo.serve(PROMPT, 2)
    duo.run(2.0)
    duo.flush(PREFILL)
    duo.run(0.5)
    before, began = pulled(duo), duo.world.now
    asked = next_turn(duo)
    duo.until(lambda: bool(asked.answer.ends))
    assert duo.world.now - began < 0.5
    assert pulled(duo) == before
    assert duo.sent(Offer, DECODE)[-1].held_len == HELD, "it was offered"


@pytest.mark.parametrize(("byte_s", "num_pulls"), [(0.0, 1), (1e-3, 0)])
def test_over_a_link_that_was_found_slow_no_pull_is_hoped_for(byte_s: float, num_pulls: int) -> None:
    """Decode draws tokens of three rows and alone holds all but five tokens of a prompt: a pull is sooner than that, if
    the link is quick. By a slow one prefill would decline, and compute all of it."""
    shape = replace(
        SHAPE, conditional_prefill=True, itl_target_s=1.0, extend_len=8, prefill_pages=200, decode_pages=400
    )
    duo = Duo(shape, by_bytes(byte_s))
    duo.serve(PROMPT, 2)
    for number in range(30, 38):
        duo.serve([number] * 20, 2)
    duo.run(2.0)
    duo.flush(PREFILL)
    duo.run(11.0)  # until the front takes it for held by decode alone
    duo.worker(DECODE).pace.slowness = 20.0
    rows = [duo.ask([number] * 9, 150) for number in range(40, 43)]
    duo.until(lambda: all(row.answer.tokens for row in rows))
    duo.run(0.6)
    before = len(duo.sent(Offer, DECODE))
    asked = next_turn(duo)
    duo.until(lambda: bool(asked.answer.ends))
    weighed = asked.usage.weighed
    assert weighed is not None and weighed.num_rows == 3
    assert (weighed.way.lacking_len, weighed.way.pulled_len) == (len(PROMPT) + PAGE, HELD)
    assert (len(duo.sent(Offer, DECODE)) - before, pulled(duo)) == (num_pulls, num_pulls)
    assert weighed.is_near is not num_pulls
    duo.settle(asked, *rows)


def test_pages_that_left_decodes_tree_meanwhile_are_computed() -> None:
    duo = known_to_decode()
    asked = next_turn(duo)
    duo.until(lambda: bool(duo.sent(Grant, PREFILL)))
    duo.flush(DECODE)
    duo.settle(asked)
    assert asked.answer.error is None
    duo.quiet()


def test_an_answer_on_its_way_is_waited_for_by_the_next_turn() -> None:
    duo = Duo(SHAPE, fabric=slow_decode(0.4))
    first = duo.ask(PROMPT, 3 * PAGE)
    duo.until(lambda: bool(first.answer.ends) and bool(duo.sent(WriteBack, DECODE)))
    asked = duo.ask([*PROMPT, *first.answer.tokens, 5], 2)
    duo.until(lambda: bool(asked.answer.ends))
    assert asked.answer.error is None
    assert asked.usage.prefill_cached_len == (len(PROMPT) + 3 * PAGE - 1) // PAGE * PAGE
    assert pulled(duo) == 0


def test_several_that_begin_alike_wait_for_one_pull() -> None:
    duo = known_to_decode(fabric=slow_decode(0.2))
    several = [duo.ask([*PROMPT, *[50 + branch] * PAGE], 2) for branch in range(3)]
    duo.settle(*several)
    assert pulled(duo) == 1
    assert {asked.usage.prefill_cached_len for asked in several} == {HELD}
    assert sorted(asked.usage.prefill_pulled_len for asked in several) == [0, 0, HELD], "for one of them"


@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_a_death_in_the_middle_of_a_pull(name: PeerName) -> None:
    duo = known_to_decode(fabric=slow_decode(0.4))
    asked = next_turn(duo)
    duo.until(lambda: pulled(duo) == 1)
    other = PREFILL if name == DECODE else DECODE
    assert not duo.held(other).is_nothing
    duo.world.kill(name)
    duo.run(15.0)
    duo.cancel(asked)
    duo.until(lambda: duo.held(other).is_nothing, limit_s=30.0)
