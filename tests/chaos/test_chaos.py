"""Real processes in a storm of faults: see soak.py for what is done and what must hold."""

import asyncio

import pytest

from tests.cells import cells
from tests.chaos.soak import Report, assert_kept, soak
from tests.chaos.storm import WEIGHTS, make_storm
from tests.chaos.watch import Growth, Memory

SEED = 1
STORM_S = 180.0
SHORT_STORM_S = 60.0


@pytest.mark.parametrize("storm_s", cells([(SHORT_STORM_S,), (STORM_S,)], lambda storm_s: storm_s == STORM_S))
def test_storm(capsys: pytest.CaptureFixture[str], storm_s: float) -> None:
    """Whether memory grows is judged over three minutes only: in one, what grows at first is all that shows."""
    report = asyncio.run(soak(SEED, storm_s, lambda text: None))
    with capsys.disabled():
        print(f"\n{report}")
    assert_kept(report)
    assert report.tally.num_right > 300 * storm_s / STORM_S


@pytest.mark.parametrize("storm_s", [SHORT_STORM_S, STORM_S])
def test_a_storm_is_made_of_its_seed_alone_and_holds_every_kind(storm_s: float) -> None:
    storm = make_storm(SEED, storm_s)
    assert storm == make_storm(SEED, storm_s) != make_storm(SEED + 1, storm_s)
    assert {event.kind for event in storm} == set(WEIGHTS)
    assert all(event.at_s + event.seconds <= storm_s for event in storm)


def test_a_leak_is_what_rises_all_the_time_and_is_not_given_back() -> None:
    assert_kept(Report(SEED, STORM_S, growth={"spans": Growth(9.0, 5.0), "steps": Growth(1.0, 20.0)}))
    with pytest.raises(AssertionError, match=r"leaks grows by 9\.00 MiB a minute, by 18\.0 MiB in all"):
        assert_kept(Report(SEED, STORM_S, growth={"leaks": Growth(9.0, 18.0)}))


def test_what_is_resident_now_and_then_is_no_leak() -> None:
    """Cycles wait for the collector, and frames for a peer: a row of teeth, none higher than the last."""
    samples = [(float(at_s), {"decode-0": 312.0 + 10.0 * (at_s % 26) / 26}) for at_s in range(181)]
    assert Memory({"decode-0": 1}, samples).growth(warm_up_s=60.0)["decode-0"].mib_per_min < 1.0


@pytest.mark.parametrize("step_at_s", [61, 90, 120, 179])
def test_a_step_of_memory_is_no_leak_and_a_leak_is_found_beside_it(step_at_s: int) -> None:
    def resident(at_s: int, leak_mib_per_min: float) -> float:
        return 300.0 + leak_mib_per_min * at_s / 60 + (at_s % 3) / 10 + (12.0 if at_s >= step_at_s else 0.0)

    samples = [(float(at_s), {"steps": resident(at_s, 0.0), "leaks": resident(at_s, 4.0)}) for at_s in range(181)]
    growth = Memory({"steps": 1, "leaks": 2}, samples).growth(warm_up_s=60.0)
    assert growth["steps"].mib_per_min == pytest.approx(0.0, abs=0.1)
    assert growth["leaks"].mib_per_min == pytest.approx(4.0, abs=0.7)
    assert growth["leaks"].mib - growth["steps"].mib == pytest.approx(8.0, abs=1.0)
