"""Several fronts share workers, each under its own name: reports tell of all of them, a room is its front's alone."""

import msgspec

from deltaserve.control.peer.link import FrameIn
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Cancel,
    Envelope,
    Facts,
    Finish,
    Finished,
    Hello,
    Message,
    Status,
    Submit,
    Tokens,
)
from deltaserve.sim.cluster import VOCAB, Shape
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, token_runs
from tests.sim.small_cluster import oracle_output

OTHER, OTHER_BOOT = PeerName("front-of-another-zone"), 777
PROMPT = [50, *range(1, 31)]
ROOM = b"the other's room"


def say(duo: Duo, dst: PeerName, body: Message) -> None:
    """A frame of the other front."""
    dst_boot = None if isinstance(body, Hello) else duo.boot(dst)
    duo.worker(dst).handle(FrameIn(Envelope(src=OTHER, src_boot=OTHER_BOOT, dst_boot=dst_boot, body=body)))


def told(duo: Duo, src: PeerName, dst: PeerName) -> list[Message]:
    return [envelope.body for s, d, envelope in duo.frames if (s, d) == (src, dst)]


def last_status(duo: Duo, src: PeerName, dst: PeerName) -> Status | None:
    reports = [body for body in told(duo, src, dst) if isinstance(body, Status)]
    return reports[-1] if reports else None


def greeted(shape: Shape) -> Duo:
    duo = Duo(shape)
    for name in (PREFILL, DECODE):
        say(duo, name, Hello(role="front", compat={}, facts=Facts()))
    duo.serve(PROMPT, 2)
    return duo


def submit(duo: Duo, max_tokens: int) -> None:
    """As the first front's last one was, in a room of the other."""
    last = duo.sent(Submit, FRONT)[-1]
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
    say(duo, DECODE, msgspec.structs.replace(last, room=ROOM, sampling=sampling))


def test_a_report_tells_every_front_of_the_rooms_of_all() -> None:
    duo = greeted(Shape(max_running=2, heartbeat_s=0.01))
    asked = [duo.ask([60 + i, *range(1, 31)], 100) for i in range(3)]
    submit(duo, 100)

    def is_told() -> bool:
        status = last_status(duo, DECODE, OTHER)
        return status is not None and (status.num_running, status.num_waiting) == (2, 2)

    duo.until(is_told)
    for name in (PREFILL, DECODE):
        assert last_status(duo, name, FRONT) == last_status(duo, name, OTHER)
    for one in asked:
        duo.cancel(one)
    say(duo, DECODE, Cancel(room=ROOM, reason=FailReason.CANCELLED))
    duo.quiet()


def test_a_room_is_told_to_its_own_front_and_obeys_no_other() -> None:
    duo = greeted(Shape())
    submit(duo, 8)
    duo.until(lambda: any(isinstance(body, Tokens) for body in told(duo, DECODE, OTHER)))
    duo.inject(DECODE, FRONT, Cancel(room=ROOM, reason=FailReason.CANCELLED))
    duo.inject(DECODE, FRONT, Finish(room=ROOM, output_len=1))
    duo.until(lambda: any(isinstance(body, Finished) for body in told(duo, DECODE, OTHER)))
    (ended,) = [body for body in told(duo, DECODE, OTHER) if isinstance(body, Finished)]
    assert (ended.reason, ended.usage.output_len) == (None, 8)
    runs = [run for body in told(duo, DECODE, OTHER) if isinstance(body, Tokens) for run in token_runs(body)]
    expected = oracle_output(pack_u32(PROMPT), 8, VOCAB)
    assert b"".join(run.tokens for run in runs) == pack_u32(expected)
    mine = [run.room for body in told(duo, DECODE, FRONT) if isinstance(body, Tokens) for run in token_runs(body)]
    assert ROOM not in mine
    duo.quiet()
