"""40 seconds of the storm of test_chaos.py in which decode computes what it finds cheaper than a hand-over, answers
return to prefill, and what was evicted comes back from files under the caches."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.cluster import settings
from tests.chaos.soak import assert_kept, soak

SEED = 3
STORM_S = 40.0
HINTS = ("done", "retain_s", "prefetch")


def test_a_storm_with_all_ways_that_a_prompt_is_had(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wanted = partial(settings, conditional_prefill="auto", cache_dir=str(tmp_path))
    report = asyncio.run(soak(SEED, STORM_S, lambda text: None, wanted))
    with capsys.disabled():
        print(f"\n{report}")
    assert_kept(report)
    tally = report.tally
    assert tally.num_right > 60
    assert tally.num_near > 0
    assert tally.num_moved > 0
    assert report.num_loaded > 0
    assert report.num_back > 0
    assert all(sum(n for told, n in tally.hints.items() if told.startswith(hint)) > 0 for hint in HINTS)
    assert not list(tmp_path.iterdir())
