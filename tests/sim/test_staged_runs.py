"""The staged path in the simulator: it is drawn, it is walked, and its waits end."""

from dataclasses import replace

import pytest

from deltaserve.control.transfer.ring import ALIGNMENT
from deltaserve.sim.cluster import Shape
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.knobs import Knobs, Traffic, draw_knobs
from deltaserve.sim.rig import Run
from deltaserve.sim.trace import Trace
from deltaserve.sim.watch import Watch

QUIET = Traffic(6, 0.3, largest=40, max_output=4, share=0.5, num_namespaces=1, max_samples=1, oddity=0.0)
SHAPE = Shape(num_heads=4, prefill_ranks=1, decode_ranks=2, prefill_staging_bytes=1 << 13, decode_staging_bytes=1 << 13)
KNOBS = Knobs(
    SHAPE, QUIET, {}, (), step_s=0.001, lag_s=0.0005, link_s=0.0005, land_s=0.002, can_fence=True, late_starts=False
)


def counts(knobs: Knobs, seed: int) -> dict[str, int]:
    """Counters of all ranks of the workers that are there in the end."""
    run = Run(seed, knobs, Trace(0), Watch(8))
    report = run.judged()
    assert report.breach is None
    assert report.num_answered
    endpoints = [rank.endpoint for worker in run.world.workers.values() for rank in worker.ranks]
    return {
        name: sum(endpoint.counters[name] for endpoint in endpoints)
        for name in ("staged_writes", "staging_fallbacks", "staging_malformed")
    }


def test_a_tenth_of_the_runs_has_staging_memory() -> None:
    drawn = [draw_knobs(seed).shape for seed in range(2000)]
    staged = [shape for shape in drawn if shape.prefill_staging_bytes]
    assert 120 < len(staged) < 280
    assert all(shape.prefill_ranks != shape.decode_ranks or shape.shares_experts for shape in staged)
    assert any(shape.decode_staging_bytes == 0 for shape in staged)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_pages_go_through_staging_memory(ranks: tuple[int, int]) -> None:
    shape = replace(SHAPE, prefill_ranks=ranks[0], decode_ranks=ranks[1])
    of_run = counts(replace(KNOBS, shape=shape), seed=1)
    assert of_run["staged_writes"] > 0
    assert of_run["staging_fallbacks"] == of_run["staging_malformed"] == 0


def test_memory_for_one_write_at_a_time_is_enough() -> None:
    shape = replace(SHAPE, prefill_staging_bytes=4 * ALIGNMENT, decode_staging_bytes=4 * ALIGNMENT)
    assert counts(replace(KNOBS, shape=shape), seed=2)["staged_writes"] > 0


def test_too_little_memory_means_direct_writes() -> None:
    shape = replace(
        SHAPE, page_size=64, chunk_len=64, prefill_staging_bytes=2 * ALIGNMENT, decode_staging_bytes=2 * ALIGNMENT
    )
    of_run = counts(replace(KNOBS, shape=shape), seed=3)
    assert of_run["staging_fallbacks"] == of_run["staged_writes"] > 0


def test_lost_frames_of_the_ring_are_told_again() -> None:
    """An ask, an answer, or the news that a lease is not needed."""
    rates = {FaultKind.NOTIFICATION_LOST: 0.1, FaultKind.SLOW_DATA: 0.2}
    for seed in range(3):
        counts(replace(KNOBS, rates=rates), seed)
