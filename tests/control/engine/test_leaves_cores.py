"""When decode leaves the cores to prefill: while that has more prompts than decode has rows, and none waits here."""

from deltaserve.control.engine.status import DecodeState
from deltaserve.core.wire.messages import Offer, Starting
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, PREFILL, Asked, Duo, healthy, slow_fabric


def leaves(duo: Duo) -> bool:
    return duo.worker(DECODE).instance.leaves_cores()


def state(duo: Duo, asked: Asked) -> DecodeState | None:
    room = duo.decode_room(asked)
    return None if room is None else room.state


def decoding(shape: Shape, max_tokens: int) -> tuple[Duo, Asked]:
    """A room that draws tokens, one each 50 ms."""
    duo = Duo(shape, fabric=slow_fabric(0.2))
    first = duo.ask(range(8), max_tokens)
    duo.worker(DECODE).pace.step_s = 0.05
    duo.until(lambda: state(duo, first) is DecodeState.RUNNING)
    return duo, first


def test_while_prefill_has_more_prompts_than_rows_draw_tokens() -> None:
    duo, first = decoding(Shape(), 40)
    assert not leaves(duo), "nobody else is served"
    behind = [duo.ask(range(start, start + 12), 3) for start in (20, 40)]
    duo.until(lambda: state(duo, behind[1]) is DecodeState.OFFERED)
    assert leaves(duo)
    duo.until(lambda: {state(duo, each) for each in behind} == {DecodeState.GRANTED})
    assert leaves(duo)
    duo.until(lambda: DecodeState.RUNNING in {state(duo, each) for each in behind})
    assert not leaves(duo)
    duo.settle(first, *behind)


def test_one_prompt_beside_one_row_is_waited_for_by_nobody() -> None:
    duo, first = decoding(Shape(), 40)
    behind = duo.ask(range(20, 40), 3)
    duo.until(lambda: state(duo, behind) is DecodeState.OFFERED)
    assert not leaves(duo)
    duo.until(lambda: state(duo, behind) is DecodeState.GRANTED)
    assert not leaves(duo)
    duo.settle(first, behind)


def test_without_rows_there_is_nothing_to_put_off() -> None:
    duo = Duo(Shape(), fabric=slow_fabric(0.2))
    alone = duo.ask(range(20), 3)
    duo.until(lambda: state(duo, alone) is DecodeState.GRANTED)
    assert not leaves(duo)
    duo.settle(alone)


def test_where_a_prompt_waits_for_memory_here_decode_is_what_takes_long() -> None:
    duo, first = decoding(Shape(decode_pages=13), 30)
    behind = duo.ask(range(20, 56), 3)
    duo.until(lambda: bool(duo.sent(Starting, PREFILL)[1:]) and state(duo, behind) is DecodeState.STARTED)
    duo.link = lambda src, dst, envelope: () if isinstance(envelope.body, Offer) else None
    last = [duo.ask(range(start, start + 8), 3) for start in (60, 70)]
    duo.until(lambda: state(duo, last[1]) is DecodeState.OFFERED)
    assert state(duo, behind) is DecodeState.STARTED
    assert not leaves(duo)
    duo.link = healthy
    duo.settle(first, behind, *last)
