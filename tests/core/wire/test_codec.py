"""The codec: what goes in comes out, and bytes from a peer give an Envelope or one ProtocolError, nothing else."""

import json
import random
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.core.errors import ProtocolError
from deltaserve.core.wire.codec import (
    HEADER_BYTES,
    LARGE_FRAME_BYTES,
    MAGIC,
    SMALL_FRAME_BYTES,
    decode,
    decode_done,
    encode,
    encode_done,
)
from deltaserve.core.wire.messages import PROTOCOL_VERSION, Done, Envelope, Offer, Revoke, TokenRun, Tokens
from tests.core.wire.samples import MESSAGE_TYPES, envelopes, golden, messages_of, sample

GOLDEN_FILE = Path(__file__).parent / f"golden_v{PROTOCOL_VERSION}.json"
NUM_MUTATIONS = 10_000


def framed(payload: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """A frame around any payload, with a right checksum."""
    return MAGIC + bytes([version]) + zlib.crc32(payload).to_bytes(4, "little") + payload


def fields_of(envelope: Envelope) -> dict[str, object]:
    fields: dict[str, object] = msgspec.msgpack.decode(encode(envelope)[HEADER_BYTES:])
    return fields


# ---------------------------------------------------------------- round trips


@given(envelopes)
@settings(max_examples=150)
def test_any_envelope_comes_back_equal(envelope: Envelope) -> None:
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("struct", MESSAGE_TYPES, ids=lambda struct: struct.__name__)
def test_each_message_comes_back_equal(struct: type[msgspec.Struct]) -> None:
    envelope = sample(struct)
    assert type(decode(encode(envelope)).body) is struct
    assert decode(encode(envelope)) == envelope


@given(messages_of(Done))
def test_done_comes_back_equal_as_a_notification(done: Done) -> None:
    assert decode_done(encode_done(done)) == done


# ---------------------------------------------------------------- golden frames


def test_golden_frames_of_this_version() -> None:
    """A changed frame is a changed protocol: it needs a new PROTOCOL_VERSION and a golden file of its own."""
    assert json.loads(GOLDEN_FILE.read_text()) == golden()


def test_golden_frames_are_still_read() -> None:
    for name, text in json.loads(GOLDEN_FILE.read_text()).items():
        assert type(decode(bytes.fromhex(text)).body).__name__ == name


# ---------------------------------------------------------------- refusals


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for frame in (noise, MAGIC + noise, framed(noise)):
        with pytest.raises(ProtocolError):
            decode(frame)


@given(st.binary(max_size=100))
def test_noise_is_no_notification(noise: bytes) -> None:
    for data in (noise, MAGIC + noise):
        with pytest.raises(ProtocolError):
            decode_done(data)


@pytest.mark.parametrize(
    "frame", [b"", b"d", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", MAGIC, MAGIC + bytes(4)]
)
def test_other_protocols_and_stumps_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a deltaserve frame"):
        decode(frame)


def test_another_version_is_refused_with_both_named() -> None:
    payload = encode(sample(Revoke))[HEADER_BYTES:]
    with pytest.raises(ProtocolError, match=f"ours {PROTOCOL_VERSION}, theirs {PROTOCOL_VERSION + 1}"):
        decode(framed(payload, version=PROTOCOL_VERSION + 1))


def test_a_flipped_bit_is_seen_by_the_checksum() -> None:
    frame = bytearray(encode(sample(Offer)))
    frame[-1] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        decode(bytes(frame))


def test_unknown_types_fields_and_missing_fields_are_refused() -> None:
    fields = fields_of(sample(Revoke))
    body = fields["body"]
    assert isinstance(body, dict)
    changed: list[dict[str, object]] = [
        fields | {"body": body | {"type": "Explode"}},
        fields | {"body": {key: value for key, value in body.items() if key != "type"}},
        fields | {"body": body | {"extra": 1}},
        fields | {"extra": 1},
        fields | {"body": {"type": "Revoke"}},
        {key: value for key, value in fields.items() if key != "src_boot"},
        fields | {"body": body | {"ticket": "7"}},
        fields | {"body": body | {"ticket": 7.5}},
        fields | {"body": body | {"ticket": None}},
    ]
    for wrong in changed:
        with pytest.raises(ProtocolError, match="malformed"):
            decode(framed(msgspec.msgpack.encode(wrong)))


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        decode(framed(encode(sample(Revoke))[HEADER_BYTES:] + b"\x00"))
    done = sample(Done).body
    assert isinstance(done, Done)
    with pytest.raises(ProtocolError, match="malformed"):
        decode_done(encode_done(done) + b"\x00")


def test_deep_nesting_is_refused() -> None:
    for opener in (b"\x91", b"\x81\xa1x"):
        with pytest.raises(ProtocolError):
            decode(framed(opener * 100_000 + b"\xc0"))


def test_an_announced_length_reserves_nothing() -> None:
    """array32, map32, bin32 and str32 headers that promise four gigabytes."""
    for header in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
        with pytest.raises(ProtocolError):
            decode(framed(header + b"\xff\xff\xff\xff"))


def test_mutated_frames_raise_nothing_but_protocol_errors() -> None:
    """Half of the mutants get a right checksum, so that the decoder itself is reached."""
    chance = random.Random(20_240_229)
    frames = [encode(sample(struct)) for struct in MESSAGE_TYPES]
    survivors = 0
    for round_number in range(NUM_MUTATIONS):
        frame = mutated(chance, chance.choice(frames))
        if round_number % 2:
            frame = framed(frame[HEADER_BYTES:])
        try:
            survivors += isinstance(decode(frame), Envelope)
        except ProtocolError:
            continue
    assert survivors < NUM_MUTATIONS // 2


def test_mutated_notifications_raise_nothing_but_protocol_errors() -> None:
    chance = random.Random(7)
    body = sample(Done).body
    assert isinstance(body, Done)
    whole = encode_done(body)
    for _ in range(NUM_MUTATIONS // 10):
        try:
            assert isinstance(decode_done(mutated(chance, whole)), Done)
        except ProtocolError:
            continue


def mutated(chance: random.Random, frame: bytes) -> bytes:
    """One to three changes: a byte replaced, bytes cut out, doubled or inserted, the end cut off."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.randint(1, 8))
        match chance.randrange(5):
            case 0:
                data[start:end] = chance.randbytes(end - start)
            case 1:
                del data[start:end]
            case 2:
                data[start:start] = data[start:end]
            case 3:
                data[start:start] = chance.randbytes(chance.randint(1, 8))
            case _:
                del data[start:]
    return bytes(data)


# ---------------------------------------------------------------- sizes


def test_small_messages_end_at_one_mebibyte() -> None:
    spare = SMALL_FRAME_BYTES - len(encode(tokens(b"")))
    assert SMALL_FRAME_BYTES - 8 < len(encode(tokens(bytes(spare - 3)))) <= SMALL_FRAME_BYTES
    with pytest.raises(ProtocolError, match=r"Tokens of \d+ bytes exceeds 1048576"):
        encode(tokens(bytes(spare + 1)))


def test_a_small_message_that_is_too_large_is_refused_on_arrival_too() -> None:
    payload = msgspec.msgpack.encode(tokens(bytes(SMALL_FRAME_BYTES)))
    with pytest.raises(ProtocolError, match="Tokens of"):
        decode(framed(payload))


def test_a_long_prompt_fits_and_a_boundless_one_does_not() -> None:
    envelope = sample(Offer)
    assert isinstance(envelope.body, Offer)
    long = msgspec.structs.replace(envelope, body=msgspec.structs.replace(envelope.body, prompt=bytes(4 * 1_000_000)))
    assert decode(encode(long)) == long
    boundless = msgspec.structs.replace(
        envelope, body=msgspec.structs.replace(envelope.body, prompt=bytes(LARGE_FRAME_BYTES))
    )
    with pytest.raises(ProtocolError, match="Offer of"):
        encode(boundless)
    with pytest.raises(ProtocolError, match="exceeds"):
        decode(framed(msgspec.msgpack.encode(boundless)))


def tokens(packed: bytes) -> Envelope:
    run = TokenRun(room=b"r" * 16, epoch=1, start=0, tokens=packed)
    return Envelope(src="decode-0", src_boot=1, dst_boot=2, body=Tokens(runs=(run,)))
