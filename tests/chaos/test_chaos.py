"""Real processes in a storm of faults: see soak.py for what is done and what must hold."""

import asyncio

import pytest

from tests.chaos.soak import assert_kept, soak
from tests.chaos.storm import WEIGHTS, make_storm

SEED = 1
STORM_S = 180.0


@pytest.mark.timeout(400)
def test_storm(capsys: pytest.CaptureFixture[str]) -> None:
    report = asyncio.run(soak(SEED, STORM_S, lambda text: None))
    with capsys.disabled():
        print(f"\n{report}")
    assert_kept(report)
    assert report.tally.num_right > 300


def test_a_storm_is_made_of_its_seed_alone_and_holds_every_kind() -> None:
    storm = make_storm(SEED, STORM_S)
    assert storm == make_storm(SEED, STORM_S) != make_storm(SEED + 1, STORM_S)
    assert {event.kind for event in storm} == set(WEIGHTS)
    assert all(event.at_s + event.seconds <= STORM_S for event in storm)
