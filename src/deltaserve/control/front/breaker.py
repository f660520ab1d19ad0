"""Circuit breaker per worker: who failed several times in a row is left alone for a while, then tried with one room.

    CLOSED --trip--> OPEN --probe--> HALF_OPEN --succeed--> CLOSED
                      ^------trip-------'

It advises only: when every worker of a kind is advised against, all of them are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deltaserve.core.ids import PeerName
from deltaserve.core.machine import Table, advance


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One room is trying the worker."""


class BreakerEvent(Enum):
    SUCCEED = "succeed"
    TRIP = "trip"
    PROBE = "probe"


BREAKER_TRANSITIONS: Table[BreakerState, BreakerEvent] = {
    BreakerState.CLOSED: {
        BreakerEvent.SUCCEED: BreakerState.CLOSED,
        BreakerEvent.TRIP: BreakerState.OPEN,
        BreakerEvent.PROBE: BreakerState.CLOSED,
    },
    BreakerState.OPEN: {
        BreakerEvent.SUCCEED: BreakerState.CLOSED,
        BreakerEvent.TRIP: BreakerState.OPEN,
        BreakerEvent.PROBE: BreakerState.HALF_OPEN,
    },
    BreakerState.HALF_OPEN: {
        BreakerEvent.SUCCEED: BreakerState.CLOSED,
        BreakerEvent.TRIP: BreakerState.OPEN,
        BreakerEvent.PROBE: BreakerState.HALF_OPEN,
    },
}

_TRIP_AFTER = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class _Circuit:
    state: BreakerState = BreakerState.CLOSED
    num_failures: int = 0
    """Failures in a row."""
    pause_s: float = _FIRST_PAUSE_S
    closed_until: float = 0.0
    """When the next probe may go. Matters in OPEN, and in HALF_OPEN when a probe's room ended in neither way."""

    def move(self, event: BreakerEvent) -> None:
        self.state = advance(BREAKER_TRANSITIONS, self.state, event, "circuit")


class Breakers:
    """One circuit per worker that ever failed."""

    def __init__(self) -> None:
        self._circuits: dict[PeerName, _Circuit] = {}

    def state(self, worker: PeerName) -> BreakerState:
        circuit = self._circuits.get(worker)
        return BreakerState.CLOSED if circuit is None else circuit.state

    def advised(self, workers: Sequence[PeerName], now: float) -> list[PeerName]:
        """Workers that may be tried now, in order; all of them when none may."""
        return [worker for worker in workers if self.may_try(worker, now)] or list(workers)

    def chosen(self, worker: PeerName, now: float) -> None:
        """A room goes there: on an open circuit it is the probe, and no other follows before the pause is over."""
        circuit = self._circuits.get(worker)
        if circuit is not None:
            circuit.move(BreakerEvent.PROBE)
            circuit.closed_until = now + circuit.pause_s

    def succeeded(self, worker: PeerName) -> None:
        """A room got its first token through this worker, or ended well there."""
        circuit = self._circuits.get(worker)
        if circuit is not None:
            circuit.move(BreakerEvent.SUCCEED)
            circuit.num_failures, circuit.pause_s = 0, _FIRST_PAUSE_S

    def failed(self, worker: PeerName, now: float) -> None:
        """A room failed through this worker's fault."""
        circuit = self._circuits.setdefault(worker, _Circuit())
        circuit.num_failures += 1
        if circuit.state is BreakerState.CLOSED and circuit.num_failures < _TRIP_AFTER:
            return
        if circuit.state is BreakerState.HALF_OPEN:
            circuit.pause_s = min(_LONGEST_PAUSE_S, 2 * circuit.pause_s)
        circuit.move(BreakerEvent.TRIP)
        circuit.closed_until = now + circuit.pause_s

    def forget(self, worker: PeerName) -> None:
        """It has left."""
        self._circuits.pop(worker, None)

    def may_try(self, worker: PeerName, now: float) -> bool:
        """Whether its circuit is closed, or the pause before the next probe over."""
        circuit = self._circuits.get(worker)
        return circuit is None or circuit.state is BreakerState.CLOSED or now >= circuit.closed_until
