"""When pages that nobody gives back make a restart the better choice.

A fence frees quarantined pages within moments. Where none is possible they stay: no timer may free them, but the
process may end, and with it everything that could still be written to.
"""

from collections.abc import Mapping

from deltaserve.control.cache.pages import is_crowded
from deltaserve.core.metrics import read_samples

MAX_AGE_S = 60.0
SHARE_PATIENCE_S = 10.0
"""Many requests that end at once put many pages into quarantine until a slow link has drained: no reason by itself."""
_FENCE_TIMES = 3.0
_PAGES = "deltaserve_pages"
_AGE = "deltaserve_quarantine_age_seconds"


def why_restart(metrics: Mapping[str, float], fence_after_s: float) -> str | None:
    """The reason, from an instance's metrics, or None. `fence_after_s`: how long a peer may take to answer a revoke."""
    age_s, patience_s = metrics.get(_AGE, 0.0), _FENCE_TIMES * fence_after_s
    if age_s > max(MAX_AGE_S, patience_s):
        return f"pages are in quarantine for {age_s:.0f} s"
    if age_s > max(SHARE_PATIENCE_S, patience_s):
        for pool, (quarantined, total) in sorted(_pools(metrics).items()):
            if is_crowded(quarantined, total):
                return f"{quarantined:.0f} of {total:.0f} pages of pool {pool} are in quarantine"
    return None


def _pools(metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Pool |-> pages in quarantine, and all."""
    pools: dict[str, tuple[float, float]] = {}
    for sample in read_samples(metrics):
        if sample.name == _PAGES:
            pool, in_quarantine = sample.labels["pool"], sample.labels["state"] == "quarantined"
            quarantined, total = pools.get(pool, (0.0, 0.0))
            pools[pool] = (quarantined + sample.value * in_quarantine, total + sample.value)
    return pools
