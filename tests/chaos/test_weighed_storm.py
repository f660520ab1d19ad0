"""40 seconds of the storm of test_chaos.py in which decode computes what it finds cheaper than a hand-over."""

import asyncio
from functools import partial

import pytest

from tests.chaos.cluster import settings
from tests.chaos.soak import assert_kept, soak

SEED = 3
STORM_S = 40.0


def test_a_storm_with_prompts_computed_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    report = asyncio.run(soak(SEED, STORM_S, lambda text: None, partial(settings, conditional_prefill="auto")))
    with capsys.disabled():
        print(f"\n{report}")
    assert_kept(report)
    tally = report.tally
    assert tally.num_right > 60
    assert tally.num_near > 10
    assert tally.num_moved > 10
