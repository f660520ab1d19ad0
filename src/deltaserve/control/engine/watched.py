"""Rooms of whose prompts a front waits to hear that they are computed and sent, without having asked for it.

Where somebody else chooses pairs and sends a request to both of a pair, decode asks for the prompt as ever, and the
prefill worker's front only waits: it submits the room here, and is told `Finished` when this worker's part of it is
over. Either may come first, so what is over is remembered for a while. Nothing here holds memory of a room.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import xxhash

from deltaserve.control.engine.peer_links import PeerLinks
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.control.peer.table import Peer
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName, Room
from deltaserve.core.tokens import TOKEN_BYTES
from deltaserve.core.wire.messages import Cancel, Finished, FinishReason, Message, Offer, Submit, Usage

ASKED_WITHIN_S = 30.0
"""Time within which a decode worker has to ask for a room that is waited for."""
ASKED_AGAIN_WITHIN_S = 2.0
"""The same for one that a decode worker has withdrawn: it may have another attempt made."""
_ROOMS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class RoomPart:
    """How this worker's part of a room ended."""

    about: bytes
    """Prompt and namespace of the room, see `digest_of`."""
    cached_len: int = 0
    failure: tuple[FailReason, str] | None = None
    """None: every page and the first token were sent."""


@dataclass(frozen=True, slots=True)
class _WaitingFront:
    about: bytes
    epoch: int
    prompt_len: int
    ends_at: float
    """When the room must have been asked for."""


def digest_of(namespace: str, prompt: bytes | bytearray, prompt_len: int) -> bytes:
    """Sixteen bytes of the client's prompt, the first `prompt_len` packed tokens, and of whose it is."""
    words = namespace.encode()
    head = len(words).to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join((head, words, memoryview(prompt)[: prompt_len * TOKEN_BYTES])))


class WatchedRooms:
    """(front, room) |-> who waits; room |-> how it ended."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._watches: dict[tuple[PeerName, Room], _WaitingFront] = {}
        self._over: OrderedDict[Room, RoomPart] = OrderedDict()

    def __len__(self) -> int:
        return len(self._watches)

    def on_frame(self, peer: Peer, message: Message, turn: EngineTurn) -> None:
        match message:
            case Submit():
                self._on_submit(peer.name, message, turn)
            case Cancel():
                self._watches.pop((peer.name, Room(message.room)), None)

    def _on_submit(self, front: PeerName, submit: Submit, turn: EngineTurn) -> None:
        """Said again it changes nothing but the number that the answer bears."""
        key = front, Room(submit.room)
        known = self._watches.get(key)
        ends_at = turn.now + ASKED_WITHIN_S if known is None else known.ends_at
        digest = digest_of(submit.namespace, submit.prompt, submit.prompt_len)
        self._watches[key] = _WaitingFront(digest, submit.epoch, submit.prompt_len, ends_at)
        part = self._over.get(key[1])
        if part is not None:
            self._tell(key, part, turn)

    def begins(self, offer: Offer, turn: EngineTurn) -> None:
        """A decode worker asks for the room: how it ended before does not count any more."""
        self._over.pop(Room(offer.room), None)
        self._give(Room(offer.room), turn.now + ASKED_WITHIN_S)

    def withdrawn(self, room: Room, turn: EngineTurn) -> None:
        """An attempt is over, and the room perhaps not."""
        self._give(room, turn.now + ASKED_AGAIN_WITHIN_S)

    def _give(self, room: Room, ends_at: float) -> None:
        """Those who wait for the room do so until then, while nobody asks for it."""
        for key, watch in self._watches.items():
            if key[1] == room:
                self._watches[key] = replace(watch, ends_at=ends_at)

    def ended(self, room: Room, part: RoomPart, turn: EngineTurn) -> None:
        """This worker's part of a room is over."""
        self._over[room] = part
        self._over.move_to_end(room)
        while len(self._over) > _ROOMS_REMEMBERED:
            self._over.popitem(last=False)
        for key in [key for key in self._watches if key[1] == room]:
            self._tell(key, part, turn)

    def tick(self, asked_for: Iterable[Room], turn: EngineTurn) -> None:
        """`asked_for`: rooms that are being computed, or wait for it."""
        if not self._watches:
            return
        known = set(asked_for)
        for key, watch in list(self._watches.items()):
            if turn.now >= watch.ends_at and key[1] not in known:
                text = "no decode worker has asked for this room, or it has withdrawn it"
                self._finish(key, None, (FailReason.NO_PEER, text), turn)

    def drop_front(self, front: PeerName) -> None:
        """Its life is over: nobody waits any more."""
        self._watches = {key: watch for key, watch in self._watches.items() if key[0] != front}

    def _tell(self, key: tuple[PeerName, Room], part: RoomPart, turn: EngineTurn) -> None:
        if part.about != self._watches[key].about:
            text = "a decode worker has a room of this number for another prompt"
            self._finish(key, None, (FailReason.ROOM_IN_USE, text), turn)
        else:
            self._finish(key, part, part.failure, turn)

    def _finish(
        self,
        key: tuple[PeerName, Room],
        part: RoomPart | None,
        failure: tuple[FailReason, str] | None,
        turn: EngineTurn,
    ) -> None:
        watch = self._watches.pop(key)
        cached_len = 0 if part is None else part.cached_len
        reason, text = (None, "") if failure is None else failure
        finished = Finished(
            room=key[1],
            epoch=watch.epoch,
            usage=Usage(prompt_len=watch.prompt_len, output_len=0, prefill_cached_len=cached_len),
            finish=FinishReason.LENGTH if failure is None else None,
            reason=reason,
            message=text,
        )
        self._links.send(key[0], finished, turn)
