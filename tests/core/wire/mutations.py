"""Frames that are almost right: real ones of every type, damaged in every way that is cheap to think of."""

import copy
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from deltaserve.core.wire.codec import HEADER_BYTES, MAGIC, SMALL_FRAME_BYTES
from deltaserve.core.wire.messages import PROTOCOL_VERSION

Payload = dict[str, Any]
_NUMBERS = (
    *(-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 7, 15, 16, 64, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1),
)
_FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
_BYTES = (b"", b"\0", b"\xff" * 4, bytes(16), b"\xff" * 16, bytes(64), b"\xff" * 65, bytes(4096))
_OTHERS: tuple[object, ...] = (None, True, False, [], {}, [[]], "", "\0", "x" * 300, "\u202e", {"": 0}, [0] * 300)


def framed(payload: bytes) -> bytes:
    """A frame whose checksum is right, whatever it holds."""
    return MAGIC + bytes([PROTOCOL_VERSION]) + zlib.crc32(payload).to_bytes(4, "little") + payload


class Mutator:
    """Draws damaged frames from good ones."""

    def __init__(self, frames: Sequence[bytes], seed: int) -> None:
        self._frames = list(frames)
        self._random = random.Random(seed)
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._flip_and_fix,
            self._cut,
            self._cut_and_fix,
            self._splice,
            self._insert,
            self._head,
            *(self._fields,) * 9,
        )

    def frame(self) -> bytes:
        """One frame, damaged in one or several ways."""
        chosen = self._random
        data = chosen.choice(self._frames)
        for _ in range(chosen.choice((1, 1, 1, 2, 3))):
            data = chosen.choice(self._ways)(data)
        return data

    def changed(self) -> Payload:
        """A payload with one to three fields changed; its types may be wrong."""
        payload: Payload = msgspec.msgpack.decode(self._random.choice(self._frames)[HEADER_BYTES:])
        for _ in range(self._random.choice((1, 1, 2, 3))):
            self._change(payload)
        return payload

    def chance(self, probability: float) -> bool:
        """Drawn from the same numbers."""
        return self._random.random() < probability

    # ------------------------------------------------------------ bytes

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            if changed:
                changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _flip_and_fix(self, data: bytes) -> bytes:
        return framed(self._flip(data[HEADER_BYTES:]))

    def _cut(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data) + 1)]

    def _cut_and_fix(self, data: bytes) -> bytes:
        return framed(self._cut(data[HEADER_BYTES:]))

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._frames)[HEADER_BYTES:]
        return framed(self._cut(data[HEADER_BYTES:]) + other[self._random.randrange(len(other)) :])

    def _insert(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data) + 1)
        size = self._random.choice((1, 2, 16, 1024, SMALL_FRAME_BYTES if self._random.random() < 0.01 else 3))
        return framed((data[:at] + self._random.randbytes(size) + data[at:])[HEADER_BYTES:])

    def _head(self, data: bytes) -> bytes:
        return self._random.randbytes(self._random.randrange(HEADER_BYTES + 1)) + data[HEADER_BYTES:]

    # ------------------------------------------------------------ fields

    def _fields(self, data: bytes) -> bytes:
        try:
            payload = msgspec.msgpack.decode(data[HEADER_BYTES:])
        except (msgspec.DecodeError, UnicodeDecodeError):  # a former mutation was here
            return data
        self._change(payload)
        return framed(msgspec.msgpack.encode(payload))

    def _change(self, payload: Any) -> None:
        """Replace, remove or add one value, somewhere."""
        places = [(holder, key) for holder, key in _places(payload)]
        if not places:
            return
        holder, key = self._random.choice(places)
        way = self._random.random()
        if way < 0.06 and isinstance(holder, dict):
            del holder[key]
        elif way < 0.1 and isinstance(holder, dict):
            holder[f"extra {way}"] = self._value(holder[key])
        elif way < 0.15 and isinstance(holder, list):
            holder.extend([holder[key]] * self._random.choice((1, 2, 100)))
        else:
            holder[key] = self._value(holder[key])

    def _value(self, old: object) -> object:
        """Mostly of the type it was, so that it passes the decoder and comes to those who must judge it."""
        draw = self._random
        if draw.random() < 0.1:
            return copy.deepcopy(draw.choice((*_OTHERS, *_NUMBERS, *_FLOATS, *_BYTES)))
        match old:
            case bool():
                return not old
            case int():
                near = (old + 1, old - 1, old ^ (1 << draw.randrange(64)))
                return draw.choice((*_NUMBERS, draw.randrange(100), *(n for n in near if -(2**63) <= n < 2**64)))
            case float():
                return draw.choice(_FLOATS)
            case bytes():
                return draw.choice(
                    (*_BYTES, old + old, old[:-1], old + b"\0", self._flip(old), draw.randbytes(len(old)))
                )
            case str():
                return draw.choice(("", "x" * 300, "front", "prefill", "decode", "normal", "Hello", "Grant", old + "x"))
        return copy.deepcopy(draw.choice(_OTHERS))


def _places(value: object) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += _places(inner)
    return found
