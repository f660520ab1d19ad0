"""Damaged frames of every message type, by the ten thousand: an Envelope or one ProtocolError comes out; what passes
the decoder harms neither worker nor front, and the next request gets the right tokens."""

import contextlib
import random
from collections.abc import Sequence

import msgspec
import pytest

from deltaserve.control.peer.link import FrameIn
from deltaserve.core.errors import ProtocolError
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.codec import decode, decode_done, encode, encode_done
from deltaserve.core.wire.messages import ChangeRole, Done, Envelope, Grant, Hello, Piece, Revoke
from deltaserve.sim.world import boot_of
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, slow_fabric
from tests.core.wire.mutations import Mutator, framed
from tests.core.wire.samples import MESSAGE_TYPES, sample

NAMES = (FRONT, DECODE, PREFILL)
PROMPT = list(range(1, 31))
PER_DUO = 250
"""Damaged frames between two canaries, or for one cluster that may not survive them."""
MANY_TICKETS = 10_000
"""More than the requests of a cluster here take."""
MANY = [
    pytest.param(10_000, id="ci"),
    pytest.param(1_000_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(0)]),
]
NUM_PARTS = 4
PARTS = [
    pytest.param(10_000, 4, id="ci"),
    *(
        pytest.param(1_000_000 // NUM_PARTS, part, id=f"long-{part}", marks=[pytest.mark.slow, pytest.mark.timeout(0)])
        for part in range(10, 10 + NUM_PARTS)
    ),
]
"""What takes long, in parts that can run side by side: frames to make, seed."""


def real_frames() -> list[bytes]:
    """What three processes say to each other over some requests, and a sample of each message type."""
    duo = Duo(fabric=slow_fabric())
    for start in (1, 1, 40):
        duo.serve(range(start, start + 30), 3)
    duo.cancel(duo.ask(PROMPT[5:], 9))
    duo.run(1.0)
    said = {encode(envelope) for _, _, envelope in duo.frames}
    return sorted(said) + [encode(sample(kind)) for kind in MESSAGE_TYPES]


FRAMES = real_frames()


@pytest.mark.parametrize("count", MANY)
def test_an_envelope_or_one_error_comes_out_of_any_frame(count: int) -> None:
    mutator = Mutator(FRAMES, seed=1)
    num_passed = 0
    for _ in range(count):
        try:
            assert isinstance(decode(mutator.frame()), Envelope)
            num_passed += 1
        except ProtocolError:
            pass
    assert count // 20 < num_passed < count // 2, "both kinds must be well represented"


@pytest.mark.parametrize("count", MANY)
def test_a_done_or_one_error_comes_out_of_any_notification(count: int) -> None:
    done = Done(ticket=3, reader_boot=2**64 - 1, writer_boot=7, chunk=0, pieces=(Piece(pool=0, first=0, end=4),))
    summed = msgspec.structs.replace(
        done, payload=b"first token", pieces=(Piece(pool=1, first=4, end=8, checksums=b"\xff" * 16),)
    )
    # The mutator fixes headers of frames; a notification has two bytes of one.
    mutator = Mutator([framed(encode_done(each)[2:]) for each in (done, summed)], seed=2)
    for _ in range(count):
        data = mutator.frame()
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode_done(data[:2] + data[7:]), Done)


class Liar:
    """Feeds damaged frames to a cluster; the books are checked after each."""

    def __init__(self, seed: int) -> None:
        self.duo = Duo(fabric=slow_fabric())
        self.duo.cluster.num_rooms = 1000  # rooms that the damaged frames do not name
        self.num_delivered = 0
        self._mutator = Mutator(FRAMES, seed)
        self._random = random.Random(seed)

    def envelope(self) -> Envelope | None:
        """A damaged frame that passes the decoder."""
        try:
            return decode(framed(msgspec.msgpack.encode(self._mutator.changed())))
        except ProtocolError:
            return None

    def deliver(self, dst: PeerName, envelope: Envelope) -> None:
        """As if the link had brought it."""
        if dst == FRONT:
            self.duo.cluster.front.handle(FrameIn(envelope))
        else:
            self.duo.worker(dst).handle(FrameIn(envelope))
        self.duo.cluster.check()
        self.num_delivered += 1
        if self._random.random() < 0.1:
            self.duo.run(self._random.choice((0.0005, 0.002, 0.02)))

    def canary(self) -> None:
        """A request gets the right tokens. What was asked for in between may still be held, up to its deadline."""
        asked = self.duo.ask(PROMPT, 3)
        self.duo.until(lambda: asked.answer.ends == 1)
        assert asked.answer.error is None
        assert tuple(asked.answer.tokens) == asked.expected

    def between(self) -> tuple[PeerName, PeerName]:
        """(src, dst), two of the three."""
        src, dst = self._random.sample(NAMES, 2)
        return src, dst

    def boot(self, name: PeerName) -> int:
        return int(boot_of("front", 1)) if name == FRONT else self.duo.boot(name)

    def posed(self, envelope: Envelope, src: PeerName, dst: PeerName) -> Envelope:
        """With the names and boots of a real link."""
        boots = {"src_boot": self.boot(src), "dst_boot": self.boot(dst)}
        return msgspec.structs.replace(envelope, src=src, **boots)


@pytest.mark.parametrize("count", MANY)
def test_strangers_change_nothing(count: int) -> None:
    """Whatever they say under names and boots of their own."""
    liar = Liar(seed=3)
    while liar.num_delivered < count // 4:
        envelope = liar.envelope()
        if envelope is None:
            continue
        _, dst = liar.between()
        name = f"stranger {liar.num_delivered % 50}"
        to = liar.boot(dst) if liar.num_delivered % 2 else envelope.dst_boot
        liar.deliver(dst, msgspec.structs.replace(envelope, src=name, dst_boot=to))
        if liar.num_delivered % PER_DUO == 0:
            liar.canary()


@pytest.mark.parametrize(("count", "seed"), PARTS)
def test_nonsense_from_peers_harms_no_other_request(count: int, seed: int) -> None:
    """On links that stay up, about rooms and tickets that nobody uses."""
    liar = Liar(seed)
    while liar.num_delivered < count // 2:
        envelope = liar.envelope()
        if envelope is None or isinstance(envelope.body, Hello | Revoke | ChangeRole):
            # These may say that a peer is another one, that it wants nothing written, or that the only worker of a role
            # is to give it up: then it gets that.
            continue
        if isinstance(envelope.body, Grant) and envelope.body.ticket < MANY_TICKETS:
            continue  # a request will get this number, and its ticket would be over already
        src, dst = liar.between()
        liar.deliver(dst, msgspec.structs.replace(liar.posed(envelope, src, dst), closed_below=1))
        if liar.num_delivered % PER_DUO == 0:
            liar.duo.run(2.0)
            liar.canary()


@pytest.mark.parametrize(("count", "seed"), PARTS)
def test_books_agree_whatever_a_peer_says_in_the_middle_of_requests(count: int, seed: int) -> None:
    """Handshakes, boots, marks and revokes too: such a peer may lose its own requests, but no page is lost or
    shared."""
    delivered, seed = 0, 1_000_000 * seed
    while delivered < count // 10:
        seed += 1
        liar = Liar(seed)
        prompts: Sequence[Sequence[int]] = (PROMPT, PROMPT[:20] + PROMPT[::-1], range(50, 90))
        for prompt in prompts:
            liar.duo.ask(prompt, 6)
        while liar.num_delivered < PER_DUO // 5:
            envelope = liar.envelope()
            if envelope is not None:
                src, dst = liar.between()
                is_posed = liar.num_delivered % 4 or not envelope.src
                liar.deliver(dst, liar.posed(envelope, src, dst) if is_posed else envelope)
        liar.duo.run(0.1)
        delivered += liar.num_delivered
