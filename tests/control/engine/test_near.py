"""Where a prompt is computed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deltaserve.control.engine.near import Cores, PromptPace, Weighing

counts = st.integers(0, 1 << 20)
IDLE = Weighing(missing_len=100, backlog_len=0, num_rows=0, prefill_wait_len=100, most_len=256)


def test_alone_decode_computes_what_prefill_would_compute() -> None:
    assert IDLE.is_near
    assert not replace(IDLE, prefill_wait_len=99).is_near


def test_beside_rows_and_other_prompts_it_takes_longer() -> None:
    assert not replace(IDLE, num_rows=1).is_near
    assert replace(IDLE, num_rows=1, prefill_wait_len=300).is_near
    assert not replace(IDLE, backlog_len=1, prefill_wait_len=150).is_near


def test_a_long_prompt_is_prefills_however_long_its_queue_is() -> None:
    assert not replace(IDLE, missing_len=257, prefill_wait_len=1 << 20).is_near


def test_on_shared_cores_what_is_computed_decides() -> None:
    """Not who waits for it, nor how long it is."""
    shared = replace(IDLE, backlog_len=10_000, num_rows=16, cores=Cores.SHARED)
    assert shared.is_near
    assert replace(shared, missing_len=5_000, prefill_wait_len=5_010).is_near
    assert not replace(shared, missing_len=5_000, prefill_wait_len=1_000).is_near, "prefill holds most of it"


def test_prefill_is_waited_for_by_the_better_of_its_two_ways() -> None:
    assert not replace(IDLE, pull_wait_len=50).is_near, "a pull is sooner there"
    assert replace(IDLE, pull_wait_len=200).is_near
    assert not replace(IDLE, prefill_wait_len=99, pull_wait_len=200).is_near


def test_what_the_file_has_is_loaded_where_that_is_sooner() -> None:
    filed = replace(IDLE, missing_len=8_000, filed_len=7_900, load_len=150, prefill_wait_len=8_000)
    assert (filed.is_near, filed.to_compute_len, filed.local_wait_len) == (True, 100, 250)
    assert replace(filed, num_rows=2).local_wait_len == 100 * 4 + 150, "rows do not wait for a load"
    assert replace(filed, cores=Cores.SHARED).local_wait_len == 250
    slow = replace(filed, load_len=7_900)
    assert (slow.is_near, slow.local_wait_len) == (False, 8_000)


def test_the_front_is_told_what_decided() -> None:
    weighed = replace(IDLE, backlog_len=7, num_rows=3, pull_wait_len=90).weighed()
    assert (weighed.missing_len, weighed.backlog_len, weighed.num_rows) == (100, 7, 3)
    assert (weighed.local_wait_len, weighed.prefill_wait_len, weighed.pull_wait_len) == (535, 100, 90)
    assert not weighed.is_near


paces = st.floats(0.0, 50.0)
weighings = st.builds(
    Weighing,
    missing_len=counts,
    backlog_len=counts,
    num_rows=st.integers(0, 512),
    prefill_wait_len=counts,
    most_len=counts,
    cores=st.sampled_from(Cores),
    filed_len=st.just(0),
    load_len=counts,
    pace=st.builds(lambda alone, more, row: PromptPace(alone, alone + more, row), paces, paces, paces),
    pull_wait_len=counts,
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
    assert replace(weighing, prefill_wait_len=weighing.prefill_wait_len + 1).is_near or not weighing.is_near


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
