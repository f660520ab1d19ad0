"""Bytes that a deltaserve server's workers moved between two looks at its `/metrics`."""

import asyncio
from dataclasses import dataclass
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

GRANTED, BACK = "deltaserve_transfer_bytes_planned_total", "deltaserve_write_back_bytes_total"
LOOK_APART_S = 1.0
"""Workers report twice a second, and answers go back after their end: two looks so far apart are the same when nothing
moves any more."""
_MOST_LOOKS = 15


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Sums over all workers."""

    granted: int
    """Bytes of the pages that decode asked prefill for."""
    back: int
    """Bytes of pages that came from decode to prefill: of answers, and of prompts before prefill computed the rest."""

    @classmethod
    def read(cls, metrics: str) -> Self | None:
        """None: these are no metrics of deltaserve's workers."""
        try:
            families = [*text_string_to_metric_families(metrics)]
        except ValueError:
            return None
        values = {GRANTED: 0, BACK: 0}
        samples = [sample for family in families for sample in family.samples if sample.name in values]
        for sample in samples:
            values[sample.name] += int(sample.value)
        return cls(values[GRANTED], values[BACK]) if samples else None

    def since(self, before: Self) -> "MovedBytes":
        """A worker that started again counts from nothing: what fell is not known, and is told as none."""
        return MovedBytes(max(0, self.granted - before.granted), max(0, self.back - before.back))


async def settled_bytes(http: httpx.AsyncClient, root: str) -> MovedBytes | None:
    """What was moved so far, once that stands still, or after some 15 s; None: `root` does not tell it."""
    seen = None
    for _ in range(_MOST_LOOKS):
        last, seen = seen, await _look(http, root)
        if seen is None or seen == last:
            break
        await asyncio.sleep(LOOK_APART_S)
    return seen


async def _look(http: httpx.AsyncClient, root: str) -> MovedBytes | None:
    try:
        response = await http.get(f"{root}/metrics")
    except httpx.HTTPError:
        return None
    return MovedBytes.read(response.text) if response.status_code == httpx.codes.OK else None
