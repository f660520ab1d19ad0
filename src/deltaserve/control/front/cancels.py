"""What workers are told of rooms that they may still have, though these are over, or have gone elsewhere."""

from collections import OrderedDict

from deltaserve.control.front.workers import Worker, Workers
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.wire.messages import Cancel

_MAX_ROOMS = 4096
"""Most rooms that are remembered: of all workers for the pause, and of each that was not there to be told."""


class Cancels:
    """Sends each Cancel once, and again where a worker goes on talking about the room, at a bounded rate."""

    def __init__(self, workers: Workers, pause_s: float) -> None:
        self._workers = workers
        self._pause_s = pause_s
        self._next: OrderedDict[tuple[PeerName, Room], float] = OrderedDict()
        """When a Cancel may next be sent."""
        self._untold: dict[PeerName, dict[Room, None]] = {}
        """Rooms of workers that were not there to be told."""

    def cancel(self, worker: Worker, room: Room, reason: FailReason, now: float) -> None:
        """The worker is told, or will be when it is back in the same life."""
        if not worker.is_ready:
            self.later(worker, room)
            return
        self._next[worker.name, room] = now + self._pause_s
        self._next.move_to_end((worker.name, room))
        while len(self._next) > _MAX_ROOMS:
            self._next.popitem(last=False)
        self._workers.send(worker, Cancel(room=room, reason=reason))

    def answer(self, worker: Worker, room: Room, now: float) -> None:
        """The worker has said something of a room that it has not."""
        if now >= self._next.get((worker.name, room), now):
            self.cancel(worker, room, FailReason.CANCELLED, now)

    def later(self, worker: Worker, room: Room) -> None:
        """The room is not the worker's any more, which cannot be told now."""
        rooms = self._untold.setdefault(worker.name, {})
        rooms[room] = None
        if len(rooms) > _MAX_ROOMS:
            del rooms[next(iter(rooms))]

    def forget(self, worker: Worker) -> list[Room]:
        """What the worker is to be told, or, where its life is over, needs not be: nothing is left of it."""
        return list(self._untold.pop(worker.name, ()))
