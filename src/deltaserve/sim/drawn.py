"""Situations that a run is in by its conditions alone (sim/situations.py)."""

from collections.abc import Callable, Iterator

from deltaserve.core.ids import Role
from deltaserve.core.transport import Evidence
from deltaserve.sim.faults import UNPROVEN_FAULTS
from deltaserve.sim.knobs import Knobs, calm
from deltaserve.sim.loopback import Mover
from deltaserve.sim.situations import Situation


def _has_smallest_pool(knobs: Knobs) -> bool:
    shape = knobs.shape
    pools = (shape.prefill_pages, Role.PREFILL), (shape.decode_pages, Role.DECODE)
    return any(count == -(-knobs.traffic.largest // shape.page_size_of(role)) for count, role in pools)


_DRAWN: dict[Situation, Callable[[Knobs], bool]] = {
    Situation.TWO_PREFILL: lambda k: k.shape.num_prefill == 2,
    Situation.TWO_DECODE: lambda k: k.shape.num_decode == 2,
    Situation.TWO_FRONTS: lambda k: k.shape.num_fronts == 2,
    Situation.UNIFIED: lambda k: k.shape.num_unified > 0,
    Situation.WINDOWED_LAYERS: lambda k: k.shape.num_pools > 1,
    Situation.RECURRENT_LAYERS: lambda k: k.shape.num_pools > 2,
    Situation.SMALLEST_POOL: _has_smallest_pool,
    Situation.FEWEST_SLOTS: lambda k: k.shape.num_pools > 2 and k.shape.spare_pages == 0,
    Situation.PAGES_OF_ONE_TOKEN: lambda k: k.shape.page_size == 1,
    Situation.PAGES_OF_64_TOKENS: lambda k: k.shape.page_size == 64,
    Situation.SEVERAL_SAMPLES: lambda k: k.traffic.max_samples > 1,
    Situation.THREE_NAMESPACES: lambda k: k.traffic.num_namespaces == 3,
    Situation.BY_PRIORITY: lambda k: k.shape.schedule_policy.startswith("priority"),
    Situation.CALLERS: lambda k: k.traffic.num_callers > 0,
    Situation.SICK_WORKER: lambda k: k.sick in k.shape.roles(),
    Situation.SICK_FRONT: lambda k: k.sick in k.shape.fronts(),
    Situation.CROWDED: lambda k: k.slowness > 10.0,
    Situation.NO_TROUBLE: lambda k: k == calm(k),
    Situation.NO_TROUBLE_UNPROVEN: lambda k: k == calm(k) and k.shape.evidence is Evidence.CONTENTS,
    Situation.SLOW_WRITES: lambda k: k.slow_writes,
    Situation.SLOW_LINKS: lambda k: k.link_bytes_per_s is not None,
    Situation.SLOW_CARDS: lambda k: k.bytes_per_s is not None,
    Situation.UNEQUAL_PAGES: lambda k: k.shape.decode_page_size not in (None, k.shape.page_size),
    Situation.READER_COPIES: lambda k: k.mover is Mover.READER,
    Situation.UNPROVEN: lambda k: k.shape.evidence is Evidence.CONTENTS,
    Situation.ACKNOWLEDGED: lambda k: (
        k.shape.evidence is Evidence.CONTENTS and k.rates.keys().isdisjoint(UNPROVEN_FAULTS)
    ),
    Situation.UNPOISONED: lambda k: not k.poisons,
    Situation.OTHER_TOKEN: lambda k: k.flavours > 1,
    Situation.GUESSES: lambda k: k.shape.max_drafts > 0,
    Situation.TWO_RANKS: lambda k: 2 in (k.shape.prefill_ranks, k.shape.decode_ranks),
    Situation.FOUR_RANKS: lambda k: 4 in (k.shape.prefill_ranks, k.shape.decode_ranks),
    Situation.REPLICATED_HEADS: lambda k: max(k.shape.prefill_ranks, k.shape.decode_ranks) > k.shape.num_heads,
    Situation.RANKS_APART: lambda k: k.rank_lag_s > 0 and max(k.shape.prefill_ranks, k.shape.decode_ranks) > 1,
    Situation.STAGING_ON_ONE_SIDE: lambda k: bool(k.shape.prefill_staging_bytes) != bool(k.shape.decode_staging_bytes),
    Situation.SLOW_GATHERS: lambda k: k.staging_pauses > 0,
    Situation.EXPERT_GROUP: lambda k: k.shape.shares_experts,
}
"""Situations that are fixed with the run's conditions |-> whether these have it; all others are noted where they
occur."""


def drawn(knobs: Knobs) -> Iterator[Situation]:
    """What these conditions are by themselves."""
    return (situation for situation, holds in _DRAWN.items() if holds(knobs))
