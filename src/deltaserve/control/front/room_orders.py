"""What workers are told of rooms: to go on behind what a client has, to end where it has all, to give one up.

A worker may still have rooms that are over or elsewhere: it is told once, when it is there.
"""

import math
from collections import OrderedDict

import msgspec

from deltaserve.control.front.known_worker import Worker
from deltaserve.control.front.streams import LiveRoom
from deltaserve.control.front.workers import Workers
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Cancel, Finish, Message, PeerAddress, Submit

_MAX_ROOMS = 4096
"""Most rooms that are remembered: of all workers for the pause, and of each that was not there to be told."""


class RoomOrders:
    """All that one front's workers are told of rooms. A Cancel is said again where a worker goes on talking about the
    room, at a bounded rate."""

    def __init__(self, workers: Workers, pause_s: float) -> None:
        self._workers = workers
        self._pause_s = pause_s
        self._next: OrderedDict[tuple[PeerName, Room], float] = OrderedDict()
        """When a Cancel may next be sent."""
        self._untold: dict[PeerName, dict[Room, None]] = {}
        """Rooms of workers that were not there to be told."""

    def submit(self, live: LiveRoom, prefill: PeerAddress | None, now: float) -> None:
        """Ask decode for the rest of the output, where the room is placed. What answers an earlier Submit counts no
        more."""
        decode = self._decode_of(live)
        assert decode is not None  # a worker that a room is placed on is never forgotten
        live.epoch += 1
        self._say(decode, _submit(live, decode, prefill, now))
        live.quiet_since = now

    def finish(self, live: LiveRoom, output_len: int) -> None:
        """Have decode keep so much of the output, and end."""
        self._say(self._decode_of(live), Finish(room=live.room, output_len=output_len))

    def withdraw(self, live: LiveRoom, reason: FailReason, now: float) -> None:
        """Have decode give the room up, if it is placed."""
        worker = self._decode_of(live)
        if worker is not None:
            self.cancel(worker, live.room, reason, now)

    def _decode_of(self, live: LiveRoom) -> Worker | None:
        return None if live.placement is None else self._workers.get(live.placement.decode)

    def _say(self, worker: Worker | None, message: Message) -> None:
        if worker is not None and worker.is_ready:
            self._workers.send(worker, message)

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


def _submit(live: LiveRoom, decode: Worker, prefill: PeerAddress | None, now: float) -> Submit:
    """What asks decode for the rest of a room's output."""
    assert live.placement is not None
    generation = live.sample.generation
    sampling = generation.sampling
    if live.has_prompt_logprobs:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return Submit(
        room=live.room,
        epoch=live.epoch,
        prompt=generation.prompt + pack_u32(live.output),
        prompt_len=live.prompt_len,
        keys=live.sample.keys.of(decode.fingerprint, decode.facts.page_size),
        namespace=generation.namespace,
        sampling=sampling,
        prefill=prefill,
        remaining_ms=max(1, math.ceil(1000 * (live.deadline - now))),
        cache=generation.cache,
        prefill_way=live.placement.prefill_way,
        decode_hit_len=max(0, live.prompt_len - live.placement.memory_tokens),
        prefill_tokens_per_s=live.placement.prefill_tokens_per_s,
        hints=generation.hints,
        priority=generation.priority,
    )
