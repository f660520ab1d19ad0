"""When quarantine makes a worker restart."""

import pytest

from deltaserve.process.worker.quarantine import why_restart


def metrics(quarantined: float, age_s: float, total: float = 100) -> dict[str, float]:
    return {
        'deltaserve_pages{pool="0",state="free"}': 50.0,
        'deltaserve_pages{pool="1",state="quarantined"}': quarantined,
        'deltaserve_pages{pool="1",state="free"}': total - quarantined,
        'deltaserve_pages_evictable{pool="1"}': 3.0,
        "deltaserve_quarantine_age_seconds": age_s,
    }


@pytest.mark.parametrize(
    ("quarantined", "age_s", "fence_after_s", "word"),
    [
        (0, 0.0, 1.0, None),
        (100, 4.0, 1.0, None),
        (25, 50.0, 1.0, None),
        (26, 6.0, 1.0, None),
        (26, 11.0, 1.0, "26 of 100 pages of pool 1"),
        (1, 61.0, 1.0, "61 s"),
        (1, 61.0, 30.0, None),
        (26, 6.0, 5.0, None),
        (1, 91.0, 30.0, "91 s"),
    ],
)
def test_share_and_age(quarantined: float, age_s: float, fence_after_s: float, word: str | None) -> None:
    reason = why_restart(metrics(quarantined, age_s), fence_after_s)
    assert (reason is None) if word is None else (reason is not None and word in reason)


def test_a_worker_without_such_metrics_is_left_alone() -> None:
    assert why_restart({}, 1.0) is None
