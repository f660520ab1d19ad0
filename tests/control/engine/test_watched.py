"""Fronts that wait for prefill's part of a room which they have not asked for: told once, whoever comes first."""

from typing import Any

import msgspec
import pytest

from deltaserve.control.engine import watched
from deltaserve.control.engine.watched import ASKED_AGAIN_WITHIN_S, ASKED_WITHIN_S
from deltaserve.control.peer.link import PeerDied
from deltaserve.core.errors import FailReason
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Cancel, Finished, FinishReason, Heartbeat, Offer, Submit
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Asked, Duo, act, slow_fabric

PROMPT = tuple(range(10, 31))


def watch(duo: Duo, asked: Asked, epoch: int = 1, **changes: Any) -> None:
    """A front says to prefill what it said to decode."""
    submit = next(each for each in duo.sent(Submit, FRONT) if each.room == asked.room)
    duo.inject(PREFILL, FRONT, msgspec.structs.replace(submit, epoch=epoch, prefill=None, **changes))


def told(duo: Duo) -> list[Finished]:
    return duo.sent(Finished, PREFILL)


def assert_done(finished: Finished, asked: Asked, epoch: int = 1) -> None:
    assert (finished.room, finished.epoch, finished.finish) == (asked.room, epoch, FinishReason.LENGTH)
    assert (finished.usage.prompt_len, finished.usage.output_len) == (len(asked.prompt), 0)


def test_it_is_told_when_the_pages_are_sent() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.until(lambda: duo.prefill_room(asked) is not None)
    assert told(duo) == []
    duo.until(lambda: duo.prefill_room(asked) is None)
    duo.settle(asked)
    (finished,) = told(duo)
    assert_done(finished, asked)
    assert len(duo.prefill.watched) == 0


def test_it_may_be_asked_when_all_is_over() -> None:
    duo = Duo()
    asked = duo.serve(PROMPT)
    watch(duo, asked)
    duo.run(0.1)
    assert_done(told(duo)[-1], asked)


def test_the_tokens_that_prefill_had_are_told() -> None:
    duo = Duo()
    duo.serve(PROMPT)
    duo.flush(DECODE)
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.settle(asked)
    assert told(duo)[-1].usage.prefill_cached_len > 0


def test_said_again_only_the_last_number_is_answered() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    for epoch in (1, 2, 3):
        watch(duo, asked, epoch)
    duo.settle(asked)
    (finished,) = told(duo)
    assert_done(finished, asked, epoch=3)


def test_a_front_that_gave_up_is_told_nothing() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.inject(PREFILL, FRONT, Cancel(room=asked.room, reason=FailReason.CANCELLED))
    duo.settle(asked)
    assert told(duo) == []


def test_a_front_s_cancel_does_not_end_the_room_that_decode_asked_for() -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: duo.prefill_room(asked) is not None)
    duo.inject(PREFILL, FRONT, Cancel(room=asked.room, reason=FailReason.CANCELLED))
    duo.settle(asked)


def test_a_room_that_decode_ended_before_it_granted() -> None:
    duo = Duo()
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.until(lambda: duo.prefill_room(asked) is not None)
    duo.inject(PREFILL, DECODE, Cancel(room=asked.room, reason=FailReason.CANCELLED))
    assert [each.reason for each in told(duo)] == [FailReason.CANCELLED]


def test_a_room_that_decode_withdraws() -> None:
    """Its front gave up. Another attempt could have come, so it is waited for a moment longer."""
    duo = Duo(fabric=slow_fabric(1.0))
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.ticket is not None)
    duo.cancel(asked)
    duo.run(ASKED_AGAIN_WITHIN_S - 0.5)
    assert told(duo) == []
    duo.run(2.0)
    assert [each.reason for each in told(duo)] == [FailReason.NO_PEER]
    duo.quiet()


def test_a_room_that_decode_withdraws_and_asks_for_again() -> None:
    duo = Duo(fabric=slow_fabric(1.0))
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.ticket is not None)
    room = duo.prefill_room(asked)
    assert room is not None
    act(duo.worker(PREFILL), lambda turn: duo.prefill.watched.withdrawn(asked.room, turn))
    offer = next(each for each in duo.sent(Offer, DECODE) if each.room == asked.room)
    act(duo.worker(PREFILL), lambda turn: duo.prefill.watched.begins(offer, turn))
    duo.settle(asked)
    (finished,) = told(duo)
    assert_done(finished, asked)


def test_a_decode_worker_that_died() -> None:
    duo = Duo(fabric=slow_fabric(1.0))
    asked = duo.ask(PROMPT, 3)
    watch(duo, asked)
    duo.until(lambda: duo.prefill_room(asked) is not None)
    duo.report(PREFILL, PeerDied(DECODE))
    assert [each.reason for each in told(duo)] == [FailReason.PEER_LOST]


@pytest.mark.parametrize(
    "changes", [{"prompt": pack_u32([1, 2, 3]), "prompt_len": 3}, {"namespace": "somebody else's"}]
)
def test_a_room_of_somebody_else(changes: dict[str, Any]) -> None:
    duo = Duo()
    asked = duo.serve(PROMPT)
    watch(duo, asked, **changes)
    duo.run(0.1)
    assert told(duo)[-1].reason is FailReason.ROOM_IN_USE


def test_a_room_that_nobody_asks_for() -> None:
    duo = Duo()
    asked = duo.serve(PROMPT)
    watch(duo, asked, room=b"nobody's room 00")
    duo.run(ASKED_WITHIN_S - 1)
    assert told(duo) == []
    duo.run(2)
    assert [each.reason for each in told(duo)] == [FailReason.NO_PEER]
    assert len(duo.prefill.watched) == 0


def test_a_front_whose_life_is_over_waits_for_nothing() -> None:
    duo = Duo()
    asked = duo.serve(PROMPT)
    watch(duo, asked, room=b"nobody's room 00")
    duo.report(PREFILL, PeerDied(FRONT))
    assert len(duo.prefill.watched) == 0


def test_few_of_the_rooms_that_are_over_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_ROOMS_REMEMBERED", 2)
    duo = Duo(Shape())
    rooms = [duo.serve([*PROMPT, last]) for last in range(3)]
    watch(duo, rooms[0])
    watch(duo, rooms[2])
    duo.run(0.1)
    assert [each.room for each in told(duo)] == [rooms[2].room]


def test_who_may_wait() -> None:
    """A Submit of a decode worker is none, and a heartbeat of the front changes nothing."""
    duo = Duo()
    asked = duo.serve(PROMPT)
    submit = next(each for each in duo.sent(Submit, FRONT) if each.room == asked.room)
    duo.inject(PREFILL, DECODE, submit)
    duo.inject(PREFILL, FRONT, Heartbeat())
    assert told(duo) == []
    assert len(duo.prefill.watched) == 0
