"""I26: while one process is in trouble, requests between others that are well go on, and soon."""

from collections.abc import Iterable

from deltaserve.control.front.streams import Placement
from deltaserve.core.errors import IntegrityError
from deltaserve.core.ids import PeerName, Room
from deltaserve.sim.clients import Asked

PATIENCE_S = 4.0
"""Longest wait of a request that neither its workers nor its front hold up."""
PATIENCE_FENCES = 3
"""Fences of the sick process to wait for besides: a transfer thread moves no pages meanwhile, and each new trouble of
that process may take one (seed 70004779)."""


class LivenessWatch:
    """Looks at all requests now and then."""

    def __init__(self, sick: PeerName, fence_s: float) -> None:
        """`sick`: the only process that faults strike. `fence_s`: how long it takes to fence it."""
        self._sick = sick
        self._patience_s = PATIENCE_S + PATIENCE_FENCES * fence_s
        self._since: dict[Room, tuple[Placement | None, float]] = {}
        """Room |-> where it is, and since when."""
        self.longest_s = 0.0

    def look(self, asked: Iterable[Asked], now: float) -> None:
        for one in asked:
            room = one.generation.room
            if one.is_over:
                self._since.pop(room, None)
                continue
            live = one.front.core.rooms.get(room)
            placement = None if live is None else live.placement
            known, since = self._since.get(room, (None, now))
            self._since[room] = (placement, since if placement == known else now)
            if placement is None or placement != known or self._sick in (*placement.workers, one.front.name):
                continue
            self.longest_s = max(self.longest_s, now - since)
            if now - since > self._patience_s:
                waits = f"{one.name} waits for {now - since:.1f} s"
                raise IntegrityError(f"I26: {waits} on {', '.join(placement.workers)}, which are well")
