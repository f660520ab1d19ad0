"""Frames about staging memory: what comes back, and what is refused."""

import pytest

from deltaserve.core.errors import ProtocolError
from deltaserve.core.wire.codec import encode_done
from deltaserve.core.wire.messages import Done
from deltaserve.core.wire.staged_frames import (
    StageAck,
    StageAsk,
    StagedData,
    StagedPages,
    StageFrame,
    StageLease,
    StageRefusal,
    StageRelease,
    decode_stage,
    encode_stage,
    is_stage_frame,
)

PAGES = StagedPages(group="kv", first=3, num_tokens=16, pages=b"\x01\0\0\0")
FRAMES: list[StageFrame] = [
    StageAsk(write=1, num_bytes=1 << 40),
    StageLease(write=1, round=2, offset=256),
    StageRefusal(write=1, reason="no memory"),
    StagedData(write=1, round=2, offset=256, ticket=3, reader_boot=4, writer_boot=5, parts=(PAGES,), note=b"done"),
    StagedData(write=1, round=0, offset=0, ticket=3, reader_boot=4, writer_boot=5, parts=(), note=b"", checksum=7),
    StageAck(write=1),
    StageRelease(write=1),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_comes_back_equal(frame: StageFrame) -> None:
    data = encode_stage(frame)
    assert is_stage_frame(data)
    assert decode_stage(data) == frame


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_every_cut_is_refused(frame: StageFrame) -> None:
    data = encode_stage(frame)
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_stage(data[:end])


def test_an_announcement_is_none_of_them() -> None:
    done = encode_done(Done(ticket=1, reader_boot=2, writer_boot=3, chunk=0, pieces=(), payload=b"x"))
    assert not is_stage_frame(done)
    with pytest.raises(ProtocolError, match="not a staging frame"):
        decode_stage(done)
