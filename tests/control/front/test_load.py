"""Reports of workers made comparable."""

from dataclasses import replace

import pytest

from deltaserve.control.front.load import Assumed, LoadReport, Unseen, decode_loads, prefill_loads, smooth
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Status

ASSUMED = Assumed(prefill_tokens_per_s=2000.0, decode_step_s=0.03, output_len=256, stale_after_s=1.0)


def status(
    waiting_tokens: int = 0,
    *,
    rooms: int = 0,
    free: int = 100,
    rate: float = 0.0,
    step_s: float = 0.0,
    way: tuple[float | None, float | None] = (None, None),
) -> Status:
    return Status(
        num_waiting=0,
        waiting_tokens=waiting_tokens,
        num_running=rooms,
        free_pages=(free, 100),
        evictable_pages=(0, 0),
        quarantined_pages=(0, 0),
        num_pages=(100, 100),
        prefill_tokens_per_s=rate,
        decode_step_s=step_s,
        handover_s=way[0],
        byte_s=way[1],
    )


def report(
    status: Status | None,
    age_s: float = 0.0,
    own_tokens: int = 0,
    own_rooms: int = 0,
    own_output_tokens: int = 0,
    unseen: Unseen | None = None,
) -> LoadReport:
    return LoadReport(
        PeerName("w"), status, age_s, 6400, 8, own_tokens, own_rooms, own_output_tokens, unseen or Unseen()
    )


def test_members_of_a_group_take_equally_long_steps() -> None:
    steps = (0.01, 0.03, 0.05)
    reports = [replace(report(status(step_s=s)), worker=PeerName(f"w{s}")) for s in steps]
    alone = decode_loads(reports, ASSUMED)
    assert [(load.step_s, load.is_in_group) for load in alone] == [(0.01, False), (0.03, False), (0.05, False)]
    reports[:2] = [replace(one, group="g") for one in reports[:2]]
    grouped = decode_loads(reports, ASSUMED)
    assert [(load.step_s, load.is_in_group) for load in grouped] == [(0.02, True), (0.02, True), (0.05, False)]


def waiting(status: Status) -> float:
    return float(status.waiting_tokens)


def test_fresh_reports_are_taken_as_they_are() -> None:
    reports = [report(status(100), age_s=1.0), report(status(300))]
    assert smooth(reports, waiting, 0.0, 1.0) == [100.0, 300.0]


def test_a_stale_report_fades_to_the_mean_of_the_fresh_ones() -> None:
    reports = [report(status(0)), report(status(400)), report(status(1000), age_s=2.0)]
    assert smooth(reports, waiting, 0.0, 1.0)[2] == pytest.approx(600.0)
    reports[2] = report(status(1000), age_s=60.0)
    assert smooth(reports, waiting, 0.0, 1.0)[2] == pytest.approx(200.0)


def test_when_all_are_stale_they_fade_to_their_own_mean() -> None:
    reports = [report(status(0), age_s=30.0), report(status(1000), age_s=30.0)]
    assert smooth(reports, waiting, 0.0, 1.0) == [pytest.approx(500.0), pytest.approx(500.0)]


def test_who_never_reported_is_taken_for_average_and_nobody_for_the_default() -> None:
    assert smooth([report(None), report(status(50))], waiting, 7.0, 1.0) == [50.0, 50.0]
    assert smooth([report(None)], waiting, 7.0, 1.0) == [7.0]


def test_a_rate_not_yet_measured_is_assumed() -> None:
    assert [p.tokens_per_s for p in prefill_loads([report(status())], ASSUMED)] == [2000.0]
    measured, unmeasured = prefill_loads([report(status(rate=500.0)), report(status())], ASSUMED)
    assert (measured.tokens_per_s, unmeasured.tokens_per_s) == (500.0, 500.0)
    assert [d.step_s for d in decode_loads([report(status())], ASSUMED)] == [0.03]


def test_who_measured_nothing_is_taken_to_be_as_quick_as_the_quickest() -> None:
    """Else a worker beside a quicker one than average would never be tried, nor measured."""
    rates = {"slow": (400.0, 0.01), "quick": (800.0, 0.02), "untried": (0.0, 0.0)}
    reports = [
        replace(report(status(rate=rate, step_s=step_s)), worker=PeerName(name))
        for name, (rate, step_s) in rates.items()
    ]
    assert prefill_loads(reports, ASSUMED)[2].tokens_per_s == 800.0
    assert decode_loads(reports, ASSUMED)[2].step_s == 0.01


def test_own_rooms_count_before_the_worker_tells_of_them() -> None:
    assert prefill_loads([report(status(10), own_tokens=900)], ASSUMED)[0].queue_tokens == 900.0
    assert prefill_loads([report(status(1000), own_tokens=900)], ASSUMED)[0].queue_tokens == 1000.0
    assert decode_loads([report(status(rooms=2), own_rooms=5)], ASSUMED)[0].num_rooms == 5.0


def test_free_memory_is_that_of_the_fullest_pool() -> None:
    unseen = Unseen(memory_tokens=10)
    load = decode_loads([report(status(waiting_tokens=30, free=25), unseen=unseen)], ASSUMED)[0]
    assert (load.free_tokens, load.pool_tokens, load.waiting_tokens) == (1600.0, 6400, 40.0)


def test_a_report_tells_of_all_fronts_and_what_was_put_there_since_is_added() -> None:
    unseen = Unseen(rooms=2, compute_tokens=500)
    told = status(1000, rooms=7)
    assert prefill_loads([report(told, own_tokens=700, unseen=unseen)], ASSUMED)[0].queue_tokens == 1500.0
    assert decode_loads([report(told, own_rooms=3, unseen=unseen)], ASSUMED)[0].num_rooms == 9.0


def test_what_ended_since_the_report_is_taken_off_it_down_to_what_is_known_to_be_there() -> None:
    unseen = Unseen(rooms=-5, compute_tokens=-900, memory_tokens=-500)
    told = status(1000, rooms=7, free=25)
    assert prefill_loads([report(told, own_tokens=50, unseen=unseen)], ASSUMED)[0].queue_tokens == 100.0
    load = decode_loads([report(told, own_rooms=1, unseen=unseen)], ASSUMED)[0]
    assert (load.num_rooms, load.waiting_tokens, load.free_tokens) == (2.0, 500.0, 1600.0)
    more = Unseen(rooms=-50, compute_tokens=-9000, memory_tokens=-1500)
    assert prefill_loads([report(told, own_tokens=50, unseen=more)], ASSUMED)[0].queue_tokens == 50.0
    load = decode_loads([report(told, own_rooms=1, unseen=more)], ASSUMED)[0]
    assert (load.num_rooms, load.waiting_tokens, load.free_tokens) == (1.0, 0.0, 2100.0)


def test_own_rooms_produce_what_they_asked_for_and_others_what_is_assumed() -> None:
    assert decode_loads([report(status())], ASSUMED)[0].output_len == 256.0
    own = report(status(rooms=4), own_rooms=4, own_output_tokens=40)
    assert decode_loads([own], ASSUMED)[0].output_len == 10.0
    shared = report(status(rooms=8), own_rooms=4, own_output_tokens=40)
    assert decode_loads([shared], ASSUMED)[0].output_len == (40 + 4 * 256) / 8


def test_a_rate_measured_long_ago_is_no_handicap_beside_one_of_now() -> None:
    """It was slow when something else ran beside it; nobody would send it anything that shows that this is over."""
    slow = replace(report(status(rate=100.0, step_s=0.5)), worker=PeerName("slow"))
    quick = report(status(rate=800.0, step_s=0.01))
    old = replace(slow, rate_age_s=11.0, step_age_s=11.0)
    assert prefill_loads([slow, quick], ASSUMED)[0].tokens_per_s == 100.0
    assert decode_loads([slow, quick], ASSUMED)[0].step_s == 0.5
    assert prefill_loads([old, quick], ASSUMED)[0].tokens_per_s == 800.0
    assert decode_loads([old, quick], ASSUMED)[0].step_s == 0.01


def test_where_all_rates_are_old_they_count() -> None:
    slow = replace(report(status(rate=100.0, step_s=0.5)), worker=PeerName("slow"), rate_age_s=60.0, step_age_s=60.0)
    quick = replace(report(status(rate=800.0, step_s=0.01)), rate_age_s=60.0, step_age_s=60.0)
    assert [load.tokens_per_s for load in prefill_loads([slow, quick], ASSUMED)] == [100.0, 800.0]
    assert [load.step_s for load in decode_loads([slow, quick], ASSUMED)] == [0.5, 0.01]


def ways(*reports: LoadReport) -> list[tuple[float | None, float | None]]:
    return [(load.handover_s, load.byte_s) for load in decode_loads(reports, ASSUMED)]


def test_hand_overs_that_nobody_measured_are_told_as_such() -> None:
    assert ways(report(status()), report(None)) == [(None, None)] * 2
    assert ways(report(status(way=(0.003, None)))) == [(0.003, None)]


def test_who_measured_no_hand_over_is_taken_for_the_quickest() -> None:
    reports = [report(status(way=(0.003, 1e-8))), report(status(way=(0.005, 0.0))), report(status())]
    assert ways(*reports) == [(0.003, 1e-8), (0.005, 0.0), (0.003, 0.0)]


def test_an_old_hand_over_says_nothing_beside_a_new_one() -> None:
    old = replace(report(status(way=(9.0, 1e-6))), way_age_s=11.0)
    assert ways(old) == [(9.0, 1e-6)]
    assert ways(old, report(status(way=(0.003, 1e-8)))) == [(0.003, 1e-8)] * 2
