"""Peers that say what is not theirs to say, or make no sense: refused, no harm to anybody else, nothing kept."""

from collections.abc import Sequence

import msgspec
import pytest

from deltaserve.control.engine.ended import ANSWER_KEPT_S
from deltaserve.control.engine.outflow import Outflow
from deltaserve.control.engine.serving import Serving
from deltaserve.control.peer.link import FrameIn
from deltaserve.control.peer.table import PeerState
from deltaserve.control.transfer.commands import Landed
from deltaserve.control.transfer.coverage import ALONE
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.first_token import FirstToken, encode_first_token
from deltaserve.core.wire.messages import (
    CacheUse,
    Component,
    Done,
    Drain,
    Drained,
    Envelope,
    Facts,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Offer,
    PeerAddress,
    Piece,
    Revoke,
    Submit,
    Tokens,
)
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, act, slow_fabric

PROMPT = list(range(1, 31))
EVIL = PeerName("evil")
BOOT = 666


def say(duo: Duo, dst: PeerName, body: Message, boot: int = BOOT, src: PeerName = EVIL) -> None:
    dst_boot = None if isinstance(body, Hello) else duo.boot(dst)
    duo.worker(dst).handle(FrameIn(Envelope(src=src, src_boot=boot, dst_boot=dst_boot, body=body)))


def hello(role: str) -> Hello:
    return Hello(role=role, compat={"fingerprint": "stamp model"}, facts=Facts(page_size=4, pool_pages=(64,)))


def an_offer(duo: Duo) -> Offer:
    """As decode makes them, for a room of its own."""
    duo.serve([50, *PROMPT], 2)
    return msgspec.structs.replace(duo.sent(Offer, DECODE)[-1], room=b"a room of evil's")


def a_grant(offer: Offer, pages: Sequence[int] = range(8)) -> Grant:
    return Grant(
        room=offer.room,
        attempt=offer.attempt,
        ticket=1,
        coverage=(Component(pool=0, first=0, pages=pack_u32(pages)),),
    )


def test_a_front_can_make_prefill_keep_nothing() -> None:
    """It has no endpoint: what was posted for it would stay pinned for ever."""
    duo = Duo()
    offer = an_offer(duo)
    say(duo, PREFILL, hello("front"))
    say(duo, PREFILL, offer)
    say(duo, PREFILL, a_grant(offer))
    duo.run(0.1)
    assert not duo.prefill.rooms
    duo.quiet()
    duo.serve(PROMPT, 3)


def test_decode_takes_no_requests_from_a_prefill_worker() -> None:
    duo = Duo()
    duo.serve([50, *PROMPT], 2)
    submit = msgspec.structs.replace(duo.sent(Submit, FRONT)[-1], room=b"a room of evil's")
    duo.inject(DECODE, PREFILL, submit)
    assert duo.decode_room(duo.serve(PROMPT, 3)) is None
    assert duo.decode.rooms.get(submit.room) is None


@pytest.mark.parametrize("role", ["prefill", "banana", ""])
def test_a_role_that_makes_no_pair_is_refused(role: str) -> None:
    duo = Duo()
    say(duo, PREFILL, hello(role))
    assert "role: ours prefill" in duo.prefill.links.refusals[EVIL][1]
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("name", [FRONT, DECODE])
def test_a_request_cannot_make_decode_greet_its_front_or_itself(name: PeerName) -> None:
    """It fails, the link it names stays as it is."""
    duo = Duo()
    duo.serve([50, *PROMPT], 2)
    wrong = PeerAddress(name=name, url="tcp://127.0.0.1:1")
    submit = msgspec.structs.replace(duo.sent(Submit, FRONT)[-1], room=b"room of no one..", prefill=wrong)
    duo.inject(DECODE, FRONT, submit)
    assert duo.decode.links.table.get(FRONT).state is PeerState.READY
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.answer.error is None
    duo.until(lambda: any(f.room == submit.room for f in duo.sent(Finished, DECODE)), limit_s=10.0)
    (ended,) = [f for f in duo.sent(Finished, DECODE) if f.room == submit.room]
    assert ended.reason is FailReason.NO_PEER
    duo.quiet()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"top_k": 0},
        {"logprobs": 10**6},
        {"prompt_logprobs": -1},
        {"seed": -1},
        {"stop_token_ids": (97,)},
        {"logit_bias": ((97, 1.0),)},
    ],
)
def test_sampling_that_no_sampler_obeys_is_refused_by_both_halves(changes: dict[str, object]) -> None:
    duo = Duo()
    offer = an_offer(duo)
    sampling = msgspec.structs.replace(offer.sampling, **changes)
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(offer, sampling=sampling))
    submit = duo.sent(Submit, FRONT)[-1]
    duo.inject(DECODE, FRONT, msgspec.structs.replace(submit, room=offer.room, sampling=sampling))
    duo.run(0.01)
    assert [f.reason for f in duo.sent(Failed)] == [FailReason.BAD_EXTENT]
    assert [f.reason for f in duo.sent(Finished, DECODE) if f.room == offer.room] == [FailReason.BAD_EXTENT]
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("remaining_ms", [2**64 - 1, 2**63, 2**53])
def test_a_deadline_beyond_all_reason_can_be_told_to_prefill(remaining_ms: int) -> None:
    duo = Duo()
    duo.serve(PROMPT, 2)
    submit = duo.sent(Submit, FRONT)[-1]
    changed = msgspec.structs.replace(submit, room=b"of all deadlines", remaining_ms=remaining_ms)
    duo.inject(DECODE, FRONT, changed)
    duo.run(0.5)
    finished = [f for f in duo.sent(Finished, DECODE) if f.room == changed.room]
    assert [f.reason for f in finished] == [None]
    duo.serve(PROMPT[::-1], 3)


@pytest.mark.parametrize("keys", [b"x", b"k" * 17, b"k" * 16, bytes(16 * 8), b"k" * 16 * 9])
def test_keys_that_are_not_the_prompts_are_refused(keys: bytes) -> None:
    """A tree that took them would refuse whoever comes with the right ones. (An Offer carries none.)"""
    duo = Duo()
    duo.serve([50, *PROMPT], 2)
    submit = msgspec.structs.replace(duo.sent(Submit, FRONT)[-1], room=b"room of no one..", keys=keys)
    duo.inject(DECODE, FRONT, submit)
    duo.run(0.01)
    assert [f.reason for f in duo.sent(Finished, DECODE) if f.room == submit.room] == [FailReason.BAD_EXTENT]
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("ticket", [0, -1, 1 << 63])
def test_numbers_that_no_ticket_has_are_refused(ticket: int) -> None:
    duo = Duo()
    offer = an_offer(duo)
    duo.inject(PREFILL, DECODE, offer)
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(a_grant(offer), ticket=ticket))
    assert [f.reason for f in duo.sent(Failed)] == [FailReason.BAD_EXTENT]
    assert len(duo.prefill.sender) == 0
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("token", [-1, 97, 1 << 32, (1 << 64) - 1])
def test_a_first_token_beyond_the_vocabulary_fails_the_attempt(token: int) -> None:
    duo = Duo(fabric=slow_fabric(0.5))
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.ticket is not None)
    (ticket,) = duo.decode.receiver
    done = Done(
        ticket=ticket.id.seq,
        reader_boot=ticket.id.reader_boot,
        writer_boot=ticket.id.writer_boot,
        chunk=0,
        pieces=(Piece(pool=0, first=0, end=len(ticket.pages[0])),),
        payload=encode_first_token(FirstToken(token=token)),
    )
    duo.report(DECODE, Landed(PREFILL, ALONE, done))
    room = duo.decode_room(asked)
    assert room is None or room.ticket is not ticket
    duo.until(lambda: asked.answer.ends == 1)
    duo.run(4.0)
    duo.quiet()
    duo.serve(PROMPT, 3)


def test_nobody_else_may_drain_or_revoke_a_pairs_ticket() -> None:
    """Not even who knows the boot that the ticket names."""
    duo = Duo(fabric=slow_fabric(0.5))
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: len(duo.decode.receiver) == 1 and len(duo.prefill.sender) == 1)
    (granted,), (sending,) = duo.decode.receiver, duo.prefill.sender
    prefill_boot, decode_boot = duo.boot(PREFILL), duo.boot(DECODE)
    say(duo, PREFILL, hello("decode"), decode_boot)
    _make_ready(duo.prefill)
    say(duo, PREFILL, Revoke(ticket=sending.id.seq), decode_boot)
    assert sending.is_open
    duo.cancel(asked)
    duo.until(lambda: granted.is_revoked)
    say(duo, DECODE, hello("prefill"), prefill_boot)
    _make_ready(duo.decode)
    say(duo, DECODE, Drained(ticket=granted.id.seq, outcome=Drain.CLEAN), prefill_boot)
    assert duo.decode.receiver.get(granted.id) is granted


def _make_ready(instance: Outflow | Serving) -> None:
    """As if its endpoint had been attached."""
    peer = instance.links.table.get(EVIL)
    greeting = instance.links.endpoints.greetings[EVIL]
    peer.hello, peer.state = greeting.theirs, PeerState.READY


def test_what_is_addressed_to_nobody_is_taken_by_nobody_but_a_greeting() -> None:
    """A Revoke for a process that is gone, replayed to its next life: that one's ticket 1 must still open."""
    duo = Duo()
    duo.inject(PREFILL, DECODE, Revoke(ticket=1), dst_boot=None)  # type: ignore[arg-type]
    assert duo.prefill.sender.num_tombstones == 0
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("highest", [2, 3, 9])
def test_a_room_whose_attempts_are_counted_anew_is_served(highest: int) -> None:
    """Prefill holds a later attempt of it than decode remembers: a stray Offer, and the room comes again."""
    duo = Duo()
    duo.serve(PROMPT, 3)
    offer, submit = duo.sent(Offer, DECODE)[-1], duo.sent(Submit, FRONT)[-1]
    duo.decode.rooms.ended.expire(duo.worker(DECODE).now + ANSWER_KEPT_S)  # or it would just tell the answer again
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(offer, attempt=highest))
    duo.inject(DECODE, FRONT, msgspec.structs.replace(submit, epoch=2, cache=CacheUse.BYPASS))
    num_told = len(duo.sent(Tokens, DECODE))
    duo.until(lambda: len(duo.sent(Tokens, DECODE)) > num_told, limit_s=3.0)
    duo.quiet()


def test_names_without_end_are_not_all_remembered() -> None:
    duo = Duo()
    for number in range(3000):
        say(duo, PREFILL, Heartbeat(), number, PeerName(f"stranger {number}"))
    assert len(duo.prefill.links.table) <= 1024
    duo.serve(PROMPT, 3)
    duo.world.run(until=duo.world.now + 62.0)
    assert len(duo.prefill.links.table) == 2
    say(duo, PREFILL, Heartbeat(), BOOT, EVIL)
    assert EVIL in duo.prefill.links.table
    duo.serve(PROMPT[:9], 3)


def test_a_late_offer_of_a_decode_worker_that_has_let_us_go_is_given_up() -> None:
    """Found by the simulator (seed 17957657030199): nobody answered for the room, and its pages stayed held."""
    duo = Duo()
    offer = an_offer(duo)
    duo.quiet()
    act(duo.worker(DECODE), lambda turn: duo.decode.links.let_go(PREFILL, turn))
    duo.inject(PREFILL, DECODE, offer)
    assert not duo.held(PREFILL).is_nothing
    duo.quiet()
