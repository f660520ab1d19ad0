"""Where a prompt is computed."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.engine.near import PromptPace, Weighing, known_better
from deltaserve.core.wire.messages import Cores, PrefillWay
from tests.control.engine.drawn_weighings import drawn_weighings

counts = st.integers(0, 1 << 20)


def by_prefill(wait_len: int, pull_wait_len: int = 0) -> PrefillWay:
    """What prefill has to do until it hands a prompt over: so much, and so much behind a pull, if there is one."""
    pulled_len = wait_len if pull_wait_len else 0
    return PrefillWay(queue_len=wait_len, lacking_len=0, handover_len=0, pulled_len=pulled_len, pull_len=pull_wait_len)


IDLE = Weighing(missing_len=100, backlog_len=0, num_rows=0, way=by_prefill(100), most_len=256)


def test_alone_decode_computes_what_prefill_would_compute() -> None:
    assert IDLE.is_near
    assert not replace(IDLE, way=by_prefill(99)).is_near


def test_beside_rows_and_other_prompts_it_takes_longer() -> None:
    assert not replace(IDLE, num_rows=1).is_near
    assert replace(IDLE, num_rows=1, way=by_prefill(300)).is_near
    assert not replace(IDLE, backlog_len=1, way=by_prefill(150)).is_near


def test_a_long_prompt_is_prefills_however_long_its_queue_is() -> None:
    assert not replace(IDLE, missing_len=257, way=by_prefill(1 << 20)).is_near


def test_on_shared_cores_what_is_computed_decides() -> None:
    """Not who waits for it, nor how long it is."""
    shared = replace(IDLE, backlog_len=10_000, num_rows=16, cores=Cores.SHARED)
    assert shared.is_near
    assert replace(shared, missing_len=5_000, way=by_prefill(5_010)).is_near
    assert not replace(shared, missing_len=5_000, way=by_prefill(1_000)).is_near, "prefill holds most of it"


def test_prefill_is_waited_for_by_the_better_of_its_two_ways() -> None:
    assert not replace(IDLE, way=by_prefill(100, 50)).is_near, "a pull is sooner there"
    assert replace(IDLE, way=by_prefill(100, 200)).is_near
    assert not replace(IDLE, way=by_prefill(99, 200)).is_near


def test_what_the_file_has_is_loaded_where_that_is_sooner() -> None:
    filed = replace(IDLE, missing_len=8_000, filed_len=7_900, load_len=150, way=by_prefill(8_000))
    assert (filed.is_near, filed.to_compute_len, filed.local_wait_len) == (True, 100, 250)
    assert replace(filed, num_rows=2).local_wait_len == 100 * 4 + 150, "rows do not wait for a load"
    assert replace(filed, cores=Cores.SHARED).local_wait_len == 250
    slow = replace(filed, load_len=7_900)
    assert (slow.is_near, slow.local_wait_len) == (False, 8_000)


def test_prefill_has_its_queue_what_it_lacks_and_the_hand_over_before_it() -> None:
    way = PrefillWay(queue_len=10, lacking_len=200, handover_len=3, pulled_len=150, pull_len=20)
    weighing = replace(IDLE, way=way)
    assert (weighing.prefill_wait_len, weighing.pull_wait_len, weighing.handed_over_len) == (213, 83, 83)
    assert replace(weighing, way=known_better(way, 0, None)).pull_wait_len == 0
    assert known_better(way, 1 << 20, None) == way
    assert replace(weighing, way=known_better(way, 90, None)).pull_wait_len == 213 - 90 + 20


def test_a_prompt_with_output_is_computed_before_others() -> None:
    way = PrefillWay(queue_len=500, lacking_len=200, handover_len=3, pulled_len=150, pull_len=20)
    known = known_better(way, 150, 40)
    assert known == PrefillWay(queue_len=0, lacking_len=40, handover_len=3, pulled_len=40, pull_len=20)


def test_the_front_is_told_what_decided() -> None:
    weighed = replace(IDLE, backlog_len=7, num_rows=3, way=by_prefill(100, 90)).weighed()
    assert (weighed.missing_len, weighed.backlog_len, weighed.num_rows) == (100, 7, 3)
    assert (weighed.local_wait_len, weighed.prefill_wait_len, weighed.pull_wait_len) == (535, 100, 90)
    assert not weighed.is_near


paces = st.floats(0.0, 50.0)
weighings = drawn_weighings(
    counts, 512, st.builds(lambda alone, more, row: PromptPace(alone, alone + more, row), paces, paces, paces)
).flatmap(lambda w: st.builds(lambda filed: replace(w, filed_len=filed), st.integers(0, w.missing_len)))


@given(weighings)
def test_more_to_do_here_never_draws_a_prompt_here(weighing: Weighing) -> None:
    """Nor does more to do there drive it away."""
    for more in (
        replace(weighing, missing_len=weighing.missing_len + 1),
        replace(weighing, backlog_len=weighing.backlog_len + 1),
        replace(weighing, num_rows=weighing.num_rows + 1),
        replace(weighing, load_len=weighing.load_len + 1),
    ):
        assert weighing.is_near or not more.is_near
    for name in ("queue_len", "lacking_len", "handover_len"):
        longer = msgspec.structs.replace(weighing.way, **{name: getattr(weighing.way, name) + 1})
        assert replace(weighing, way=longer).is_near or not weighing.is_near


@given(weighings, st.floats(1.0, 10.0))
def test_a_slower_decode_never_draws_a_prompt_here(weighing: Weighing, factor: float) -> None:
    """As long as it computes what it would have computed, and does not load it instead."""
    pace = weighing.pace
    slower = replace(weighing, pace=PromptPace(pace.alone * factor, pace.beside * factor, pace.of_row * factor))
    assert weighing.is_near or not slower.is_near or slower.is_loaded > weighing.is_loaded


def test_paces_count_for_the_prompt_and_for_each_row() -> None:
    pace = PromptPace(alone=3.0, beside=4.0, of_row=0.5)
    assert replace(IDLE, pace=pace).local_wait_len == 300
    assert replace(IDLE, pace=pace, num_rows=6).local_wait_len == 700
    assert replace(IDLE, pace=pace, backlog_len=100).local_wait_len == 800
