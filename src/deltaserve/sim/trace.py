"""What happened in a run, as lines: one hash over all of them, and the lines themselves when asked for."""

import xxhash

from deltaserve.core.wire.messages import (
    Ask,
    Cancel,
    Drained,
    Draining,
    Envelope,
    Failed,
    Finished,
    Grant,
    Hello,
    Offer,
    PromptLogprobs,
    Queued,
    Revoke,
    Sent,
    Starting,
    Submit,
    Tokens,
)


class Trace:
    """Equal runs have equal hashes."""

    def __init__(self, keep: int = 0) -> None:
        """`keep`: lines to remember, the last ones."""
        self._hash = xxhash.xxh3_64()
        self._keep = keep
        self.lines: list[str] = []

    def note(self, now: float, *words: object) -> None:
        line = f"{now:.6f} {' '.join(map(str, words))}"
        self._hash.update(line.encode())
        if self._keep:
            self.lines.append(line)
            if len(self.lines) >= 2 * self._keep:
                del self.lines[: -self._keep]

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def describe(envelope: Envelope) -> str:
    """A frame in a few words."""
    body = envelope.body
    kind = type(body).__name__
    match body:
        case Offer() | Queued() | Ask() | Starting() | Failed():
            detail = f"{room_label(body.room)}.{body.attempt}"
        case Grant():
            detail = f"{room_label(body.room)}.{body.attempt} ticket {body.ticket}"
        case Revoke() | Draining() | Sent():
            detail = f"ticket {body.ticket}"
        case Drained():
            detail = f"ticket {body.ticket} {body.outcome.value}"
        case Submit():
            detail = f"{room_label(body.room)}.{body.epoch} {len(body.prompt) // 4}+{body.sampling.max_tokens}"
        case Cancel() | PromptLogprobs():
            detail = room_label(body.room)
        case Finished():
            detail = f"{room_label(body.room)} {(body.finish or body.reason or kind)}"
        case Tokens():
            places = [(run.room, run.start) for run in body.runs]
            if body.next is not None:
                places += [(place.room, place.start + body.next.ahead) for place in body.next.places]
            detail = " ".join(f"{room_label(room)}@{start}" for room, start in places)
        case Hello():
            detail = body.role
        case _:
            detail = ""
    return f"{kind} {detail}".strip()


def room_label(room: bytes) -> str:
    """Label of a room: simulated rooms are numbers."""
    return f"r{int.from_bytes(room, 'little')}" if len(room) == 16 else "r?"
