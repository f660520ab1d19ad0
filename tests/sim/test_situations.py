"""What docs/reliability.md says that runs contain is counted, told and gated; the judge's own knobs reach it."""

from dataclasses import replace
from functools import cache

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import Envelope, Heartbeat
from deltaserve.sim.cluster import Shape
from deltaserve.sim.drawn import drawn
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.knobs import Knobs, draw_knobs
from deltaserve.sim.rig import Report, simulate
from deltaserve.sim.situations import RUNS_PER_RATE, Situation
from deltaserve.sim.summary import Summary
from deltaserve.sim.work import MARGIN, WorkBound
from tests.sim.small_cluster import Cluster
from tests.sim.test_staged_runs import KNOBS, SHAPE

PREFILL, DECODE = PeerName("prefill-0"), PeerName("decode-0")


@cache
def all_drawn() -> tuple[Knobs, ...]:
    """Made for the first test that asks: every process that collects imports this file."""
    return tuple(map(draw_knobs, range(4000)))


def summary_of(situations: frozenset[Situation], num_runs: int) -> Summary:
    summary = Summary()
    for seed in range(num_runs):
        summary.add(Report(seed, situations=situations))
    return summary


def test_every_situation_has_words_of_its_own_and_a_least_number() -> None:
    assert len({situation.words for situation in Situation}) == len(Situation)
    assert all(situation.least > 0 for situation in Situation)


@pytest.mark.parametrize("situation", Situation, ids=lambda situation: situation.name)
def test_one_that_is_too_rare_is_named(situation: Situation) -> None:
    num_runs = -(-RUNS_PER_RATE // situation.least)  # in which it must be at least once
    others = frozenset(Situation) - {situation}
    (gap,) = (gap for gap in summary_of(others, num_runs).gaps() if gap.startswith(situation.words + ":"))
    assert gap == f"{situation.words}: 0 of {num_runs} runs"
    assert not any(gap.startswith(situation.words + ":") for gap in summary_of(frozenset(Situation), num_runs).gaps())


def test_the_summary_tells_each_and_sums_are_summaries() -> None:
    one, other = summary_of(frozenset({Situation.STAGED}), 2), summary_of(frozenset({Situation.STAGED}), 3)
    one.merge(other)
    lines = [line for line in one.lines() if Situation.STAGED.words in line]
    assert [line.split()[-2] for line in lines] == ["5"]


def test_half_of_the_staging_runs_may_cut_several_windows() -> None:
    staged = [knobs.shape for knobs in all_drawn() if knobs.shape.prefill_staging_bytes]
    cut = [shape for shape in staged if shape.window_bytes is not None]
    assert len(cut) > 0.6 * len(staged)
    assert all(shape.chunk_len >= 3 * shape.page_size for shape in cut)


def test_a_staged_chunk_is_cut_into_several_windows_of_a_pool() -> None:
    shape = replace(SHAPE, page_size=64, chunk_len=256, window_bytes=256, context_len=300)
    traffic = replace(KNOBS.traffic, largest=300)
    report = simulate(1, replace(KNOBS, shape=shape, traffic=traffic))
    assert report.breach is None
    assert {Situation.STAGED, Situation.SEVERAL_WINDOWS, Situation.MIDDLE_WINDOWS} <= report.situations


def test_ranks_that_send_nothing_are_late_where_there_are_some() -> None:
    late = [knobs for knobs in all_drawn() if knobs.idle_rank_lag_s]
    assert len(late) > 40
    assert all(0 < len(knobs.shape.ranks_without_readers()) < knobs.shape.prefill_ranks for knobs in late)
    assert all(FaultKind.COMPLETION_FIRST in knobs.rates for knobs in late)


def test_a_frame_of_an_earlier_life_may_come_behind_one_of_a_later() -> None:
    """Each life has connections of its own, in which order is kept."""
    cluster = Cluster(Shape())
    cluster.warm_up()
    world = cluster.world
    for delay in (3.0, 2.0, 1.0):
        worker = world.workers[PREFILL]
        beat = Envelope(src=PREFILL, src_boot=worker.config.boot, dst_boot=None, body=Heartbeat())
        world.carry(PREFILL, DECODE, encode(beat), delay)
        world.kill(PREFILL)
        cluster.start(PREFILL)
    assert Situation.LATE_LIFE not in world.seen
    world.run(until=world.now + 5.0)
    assert {Situation.LATE_LIFE, Situation.THREE_LIVES} <= world.seen
    cluster.check()


def test_some_runs_end_a_worker_again_and_again() -> None:
    short = [knobs for knobs in all_drawn() if knobs.life_lag_s]
    assert len(short) > 60
    assert all(FaultKind.CRASH_LOOP in {kind for _, kind in knobs.events} for knobs in short)


def test_conditions_are_situations_by_themselves() -> None:
    met = {situation for knobs in all_drawn() for situation in drawn(knobs)}
    assert {Situation.UNEQUAL_PAGES, Situation.SICK_FRONT, Situation.SLOW_WRITES, Situation.SMALLEST_POOL} <= met


def test_several_events_make_one_turn() -> None:
    report = simulate(5, replace(KNOBS, turn_s=0.005))
    assert report.breach is None
    assert report.num_answered == report.num_requests
    assert Situation.SEVERAL_EVENTS in report.situations
    assert max(report.turns) > 2


@pytest.mark.parametrize(
    ("num_events", "size"),
    [(0, "none"), (1, "1"), (2, "2"), (3, "3-5"), (5, "3-5"), (6, "more"), (900, "more")],
)
def test_the_summary_tells_how_many_events_turns_had(num_events: int, size: str) -> None:
    summary, report = Summary(), Report(1)
    report.turns[num_events] = 7
    for _ in range(2):
        summary.add(report)
    (line,) = (line for line in summary.lines() if line.startswith("turns of workers by events:"))
    assert [part.split()[-2:] for part in line.split(",") if not part.endswith(" 0")] == [[f"{size}:", "14"]]


def test_plans_are_made_at_once_or_late_behind_a_step_that_is_long_enough() -> None:
    late = [knobs for knobs in all_drawn() if knobs.plans_late]
    assert 0.1 * len(all_drawn()) < len(late) < 0.5 * len(all_drawn())
    assert all(knobs.step_s >= 0.003 and knobs.sick is None for knobs in late)
    ahead = replace(KNOBS, shape=replace(KNOBS.shape, steps_ahead=1), step_s=0.01)
    for plans_late in (True, False):
        report = simulate(5, replace(ahead, plans_late=plans_late))
        assert report.breach is None
        assert Situation.STEP_AHEAD in report.situations


def test_work_is_bounded_by_requests_time_and_ranks() -> None:
    alone, ranks = WorkBound.of(Shape()), WorkBound.of(Shape(prefill_ranks=4, prefill_staging_bytes=1 << 12))
    assert alone.most(10, 0.0) - alone.most(9, 0.0) == MARGIN * alone.per_request
    assert ranks.per_request == 8 * alone.per_request
    assert alone.most(1, 60.0) < 10_000
