"""40 seconds of the storm of test_chaos.py over NIXL, where that one runs over what workers of one machine take."""

import asyncio
from functools import partial

import pytest

from tests.chaos.cluster import settings
from tests.chaos.soak import assert_kept, soak
from tests.chaos.storm import WEIGHTS, make_storm

SEED = 2
STORM_S = 40.0


def test_it_holds_every_kind_of_fault() -> None:
    assert {event.kind for event in make_storm(SEED, STORM_S)} == set(WEIGHTS)


def test_a_storm_over_nixl(capsys: pytest.CaptureFixture[str]) -> None:
    report = asyncio.run(soak(SEED, STORM_S, lambda text: None, partial(settings, backend="nixl")))
    with capsys.disabled():
        print(f"\n{report}")
    assert_kept(report)
    assert report.tally.num_right > 60
