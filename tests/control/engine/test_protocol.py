"""Frames that come twice, late, from another life or with wrong content: the same answer or none, and no harm."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from deltaserve.control.engine.status import DecodeState, PrefillState
from deltaserve.control.peer.link import FrameIn
from deltaserve.control.transfer.commands import Landed, TicketId
from deltaserve.control.transfer.coverage import ALONE
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName, TicketSeq
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Cancel,
    Component,
    Done,
    Drain,
    Drained,
    Envelope,
    Facts,
    Failed,
    Grant,
    Hello,
    Offer,
    PeerAddress,
    Piece,
    Revoke,
    Starting,
    Submit,
)
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Asked, Duo, healthy, slow_fabric

PROMPT = list(range(1, 31))


@dataclass
class Echo:
    """Delivers every frame of one type a second time, later."""

    kind: type
    later_s: float
    num_echoed: int = field(default=0)

    def __call__(self, src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        if not isinstance(envelope.body, self.kind):
            return None
        self.num_echoed += 1
        return (0.0005, 0.0005 + self.later_s)


@pytest.mark.parametrize("later_s", [0.0, 0.003, 0.012, 0.03, 0.2])
@pytest.mark.parametrize("kind", [Submit, Offer, Starting, Grant, Revoke, Drained, Cancel, Failed, Hello])
def test_a_frame_that_comes_twice_changes_nothing(kind: type, later_s: float) -> None:
    """Also when the room it speaks of is long over."""
    echo = Echo(kind, later_s)
    duo = Duo(fabric=slow_fabric(0.01), link=echo)
    cancelled = duo.ask([70, *PROMPT], 9)
    duo.run(0.013)
    duo.cancel(cancelled)
    asked = [duo.ask([60 + i, *PROMPT], 9) for i in range(2)]
    duo.settle(*asked)
    duo.run(1.0)
    assert not duo.prefill.rooms
    assert not duo.decode.rooms
    assert echo.num_echoed > 0 or kind in (Failed, Drained, Revoke)


def test_a_repeated_submit_of_a_live_room_is_ignored() -> None:
    duo = Duo()
    asked = duo.ask(PROMPT, 9)
    duo.until(lambda: len(asked.answer.tokens) > 1)
    (submit,) = duo.sent(Submit, FRONT)
    duo.inject(DECODE, FRONT, submit)
    duo.settle(asked)


def test_a_repeated_grant_opens_nothing_again() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Grant, DECODE)))
    duo.until(lambda: len(duo.prefill.sender) == 1)
    for _ in range(3):
        duo.inject(PREFILL, DECODE, duo.sent(Grant, DECODE)[0])
    assert len(duo.prefill.sender) == 1
    duo.settle(asked)


def test_a_revoke_of_an_unknown_ticket_is_answered_clean() -> None:
    duo = Duo()
    duo.inject(PREFILL, DECODE, Revoke(ticket=77))
    duo.run(0.01)
    assert duo.sent(Drained) == [Drained(ticket=77, outcome=Drain.CLEAN)]
    assert duo.prefill.sender.num_tombstones == 1


def test_prefill_ends_a_room_whose_ticket_was_closed_before_it_came() -> None:
    """The attempt is over on decode, which grants each attempt once: it must not wait here for ever."""
    duo = Duo(link=lambda src, dst, e: () if isinstance(e.body, Grant | Cancel | Revoke) else None)
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.state is PrefillState.AHEAD)
    (grant,) = duo.sent(Grant, DECODE)
    duo.inject(PREFILL, DECODE, Revoke(ticket=grant.ticket))
    duo.inject(PREFILL, DECODE, grant)
    assert duo.prefill_room(asked) is None
    assert duo.held(PREFILL).is_nothing


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_late_offer_of_a_room_that_runs_already_is_taken_back(attempt: int) -> None:
    """Prefill has forgotten the room and starts over; decode tells it that nobody waits for that."""
    duo = Duo()
    asked = duo.ask(PROMPT, 60)
    duo.until(lambda: len(asked.answer.tokens) > 2)
    (first,) = duo.sent(Offer, DECODE)
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(first, attempt=attempt))
    assert duo.prefill_room(asked) is not None
    duo.until(lambda: duo.prefill_room(asked) is None, limit_s=0.02)
    assert duo.decode_room(asked) is not None
    duo.settle(asked)


def test_a_late_failure_of_a_transfer_that_has_landed_changes_nothing() -> None:
    duo = Duo()
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.state is DecodeState.VERIFYING)
    failed = Failed(room=asked.room, attempt=1, reason=FailReason.CANCELLED, message="no such attempt here")
    duo.inject(DECODE, PREFILL, failed)
    duo.settle(asked)
    assert len(duo.sent(Offer, DECODE)) == 1


# ---------------------------------------------------------------- other lives


def test_frames_of_another_boot_change_nothing() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: len(duo.decode.receiver) == 1)
    (ticket,) = duo.decode.receiver
    duo.inject(DECODE, PREFILL, Drained(ticket=ticket.id.seq, outcome=Drain.DIRTY), dst_boot=12345)
    failed = Failed(room=asked.room, attempt=1, reason=FailReason.INTERNAL, message="")
    duo.inject(DECODE, PREFILL, failed, dst_boot=12345)
    duo.inject(PREFILL, DECODE, Revoke(ticket=ticket.id.seq), dst_boot=12345)
    assert duo.decode.links.stale_frames == 2
    assert duo.prefill.links.stale_frames == 1
    duo.settle(asked)


def test_a_frame_of_a_dead_boot_is_ignored() -> None:
    duo = Duo()
    old = duo.boot(PREFILL)
    duo.cluster.world.kill(PREFILL)
    duo.cluster.start(PREFILL)
    duo.cluster.warm_up()
    duo.run(1.0)
    body = Failed(room=bytes(16), attempt=1, reason=FailReason.INTERNAL, message="")
    duo.worker(DECODE).handle(FrameIn(Envelope(src=PREFILL, src_boot=old, dst_boot=duo.boot(DECODE), body=body)))
    assert duo.decode.links.stale_frames >= 1
    assert duo.decode.links.is_ready(PREFILL)
    duo.serve(PROMPT, 3)


def test_a_hello_is_answered_alike_however_often_it_comes() -> None:
    duo = Duo()
    (hello,) = {h.ends: h for h in duo.sent(Hello, DECODE) if h.ends}.values()
    answers = [h for h in duo.sent(Hello, PREFILL) if h.ends]
    for _ in range(3):
        duo.inject(PREFILL, DECODE, hello)
    again = [h for h in duo.sent(Hello, PREFILL) if h.ends]
    assert again == [answers[0]] * (len(answers) + 3)
    duo.serve(PROMPT, 3)


def test_a_mark_in_a_hello_closes_older_grants() -> None:
    """Decode fences and sends a new Hello: a grant from before, overtaken by that Hello, must never open."""
    duo = Duo(link=lambda src, dst, e: () if isinstance(e.body, Grant) else None)
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Grant, DECODE)))
    grant = duo.sent(Grant, DECODE)[0]
    (ticket,) = duo.decode.receiver
    assert ticket.id.seq == grant.ticket
    duo.report(DECODE, FrameIn(_lost(duo)))
    duo.until(lambda: duo.decode.links.is_ready(PREFILL) and duo.decode.receiver.get(ticket.id) is None)
    duo.inject(PREFILL, DECODE, grant)
    assert duo.prefill.sender.get(TicketId(ticket.id.reader_boot, ticket.id.writer_boot, TicketSeq(1))) is None
    duo.link = healthy
    duo.until(lambda: asked.answer.ends == 1, limit_s=60.0)


def _lost(duo: Duo) -> Envelope:
    """Prefill tells decode that it fenced."""
    body = Failed(room=duo.sent(Grant, DECODE)[0].room, attempt=1, reason=FailReason.PEER_FENCED, message="")
    return Envelope(src=PREFILL, src_boot=duo.boot(PREFILL), dst_boot=duo.boot(DECODE), body=body)


# ---------------------------------------------------------------- wrong content


def granted(duo: Duo) -> Asked:
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.state is DecodeState.GRANTED)
    return asked


@pytest.mark.parametrize(
    "pieces",
    [
        (Piece(pool=0, first=0, end=9),),
        (Piece(pool=0, first=7, end=9),),
        (),
        (Piece(pool=0, first=0, end=1, checksums=b"abcdabcd"),),
        (Piece(pool=1, first=0, end=1),),
    ],
    ids=["too many", "beyond", "empty", "checksums of two pages", "other pool"],
)
def test_an_announcement_of_what_was_not_granted_fails_the_attempt_and_keeps_the_link(
    pieces: tuple[Piece, ...],
) -> None:
    duo = Duo(fabric=slow_fabric(0.5))
    asked = granted(duo)
    (ticket,) = duo.decode.receiver
    done = Done(
        ticket=ticket.id.seq,
        reader_boot=ticket.id.reader_boot,
        writer_boot=ticket.id.writer_boot,
        chunk=5,
        pieces=pieces,
    )
    duo.report(DECODE, Landed(PREFILL, ALONE, done))
    room = duo.decode_room(asked)
    assert room is None or room.ticket is not ticket
    assert ticket.is_revoked
    assert duo.decode.links.is_ready(PREFILL)
    duo.until(lambda: asked.answer.ends == 1, limit_s=60.0)
    duo.quiet(limit_s=30.0)
    duo.serve(PROMPT, 3)


def offer(duo: Duo, **changes: object) -> Offer:
    """An offer decode has just made, with some fields changed and a room of its own."""
    duo.serve([50, *PROMPT], 2)
    sent = duo.sent(Offer, DECODE)[-1]
    return msgspec.structs.replace(sent, room=b"another room 123", **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": b""}, FailReason.BAD_EXTENT),
        ({"prompt": b"\x01\x00\x00"}, FailReason.BAD_EXTENT),
        ({"prompt": pack_u32([1, 2, 97])}, FailReason.BAD_EXTENT),
        ({"prompt_len": 0}, FailReason.BAD_EXTENT),
        ({"prompt_len": 99}, FailReason.BAD_EXTENT),
        ({"prompt": pack_u32([1] * 300)}, FailReason.TOO_LONG),
    ],
)
def test_an_offer_that_cannot_be_served_is_refused_by_name(changes: dict[str, object], reason: FailReason) -> None:
    duo = Duo()
    wrong = offer(duo, **changes)
    duo.inject(PREFILL, DECODE, wrong)
    duo.run(0.01)
    (failed,) = duo.sent(Failed)
    assert (failed.room, failed.reason) == (wrong.room, reason)
    assert not duo.prefill.rooms
    duo.serve(PROMPT, 3)


def component(pages: Sequence[int], pool: int = 0, first: int = 0) -> Component:
    return Component(pool=pool, first=first, pages=pack_u32(pages))


@pytest.mark.parametrize(
    "changes",
    [
        {"coverage": ()},
        {"coverage": (component(range(7)),)},
        {"coverage": (component(range(8)), component(range(8)))},
        {"coverage": (component(range(8), pool=1),)},
        {"coverage": (component([*range(7), 64]),)},
        {"coverage": (component([*range(7), 0]),)},
        {"coverage": (component(range(7), first=2),)},
        {"coverage": (component(range(9), first=-1),)},
        {"coverage": (component((), first=9),)},
    ],
    ids=["none", "short", "pool twice", "other pool", "beyond the arena", "page twice", "long", "negative", "past"],
)
def test_a_grant_that_does_not_fit_fails_the_attempt_and_keeps_the_link(changes: dict[str, object]) -> None:
    duo = Duo(link=lambda src, dst, e: () if isinstance(e.body, Grant) else None)
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Grant, DECODE)))
    grant = duo.sent(Grant, DECODE)[0]
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(grant, **changes))
    failed = duo.sent(Failed)
    assert [(f.room, f.reason) for f in failed] == [(asked.room, FailReason.BAD_EXTENT)]
    assert len(duo.prefill.sender) == 0
    assert duo.prefill.links.is_ready(DECODE)
    duo.link = healthy
    duo.until(lambda: asked.answer.ends == 1, limit_s=60.0)
    duo.quiet(limit_s=30.0)
    duo.serve(PROMPT, 3)


def test_unequal_compat_fields_are_refused_with_both_values() -> None:
    duo = Duo(Shape())
    hello = next(h for h in duo.sent(Hello, DECODE) if h.ends)
    wrong = msgspec.structs.replace(hello, compat={"fingerprint": "another"})
    duo.inject(PREFILL, DECODE, wrong)
    assert duo.prefill.links.misfits() == {DECODE: "fingerprint: ours stamp model, theirs another"}
    assert not duo.prefill.links.is_ready(DECODE)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_worker_of_another_model_that_is_started_again_rightly_is_taken(name: PeerName, is_seen: bool) -> None:
    duo = Duo()
    end = duo.world.kill if is_seen else duo.world.end

    def start_again(**changes: object) -> None:
        end(name)
        duo.run(3.0)
        duo.cluster.start(name, **changes)

    start_again(compat=(("fingerprint", "another"),), fingerprint="another")
    duo.run(5.0)
    assert "does not fit prefill-0: fingerprint: here " in (duo.cluster.front.core.ready() or "")
    assert not duo.decode.links.is_ready(PREFILL)
    start_again()
    duo.until(lambda: duo.cluster.front.core.ready() is None)
    duo.serve(PROMPT, 3)
    assert not duo.decode.links.refusals


def tell_address(duo: Duo, url: str) -> None:
    """The front, or a frame of it that is long out of date."""
    where = PeerAddress(name=PREFILL, url=url)
    duo.inject(DECODE, FRONT, Hello(role="front", compat={}, facts=Facts(), peers=(where,)))


def test_another_address_ends_no_link_and_is_where_the_peer_is_looked_for_next() -> None:
    duo = Duo(fabric=slow_fabric(1.0))
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: len(duo.decode.receiver) > 0)
    known = duo.worker(DECODE).dialled[PREFILL]
    tell_address(duo, "sim://elsewhere")
    assert duo.worker(DECODE).dialled[PREFILL] == known
    assert duo.decode.links.is_ready(PREFILL)
    duo.settle(asked)
    duo.world.end(PREFILL)
    duo.cluster.start(PREFILL).url = "sim://elsewhere"
    duo.until(lambda: duo.worker(DECODE).dialled[PREFILL] == "sim://elsewhere")
    duo.until(lambda: duo.decode.links.is_ready(PREFILL))


def test_an_address_of_long_ago_is_given_up_again() -> None:
    duo = Duo()
    known = duo.worker(DECODE).dialled[PREFILL]
    duo.world.kill(PREFILL)
    tell_address(duo, "sim://long-ago")
    assert duo.worker(DECODE).dialled[PREFILL] == "sim://long-ago"
    duo.cluster.start(PREFILL)
    duo.until(lambda: duo.decode.links.is_ready(PREFILL))
    assert duo.worker(DECODE).dialled[PREFILL] == known
