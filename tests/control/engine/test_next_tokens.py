"""Rows that decode on and on: one frame a step for each front, and the order of what it says of a room."""

from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import Finished, Tokens
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, FRONT, Duo, token_runs

LEN = 20


def test_rooms_that_go_on_share_a_frame_whose_list_stays() -> None:
    duo = Duo()
    asked = [duo.ask([50 + i, *range(1, 12)], LEN) for i in range(3)]
    duo.until(lambda: all(one.answer.ends for one in asked))
    assert [tuple(one.answer.tokens) for one in asked] == [one.expected for one in asked]
    told = [tokens.next for tokens in duo.sent(Tokens, DECODE) if tokens.next is not None]
    together = [following for following in told if len(following.places) == 3]
    assert len(together) >= LEN // 2
    assert len({following.places for following in together}) == 1
    assert [following.ahead for following in together] == list(range(len(together)))


def test_every_token_is_told_once_in_its_order_and_before_the_end() -> None:
    duo = Duo(Shape(steps_ahead=2))
    asked = [duo.ask([50 + i, *range(1, 12)], LEN - i) for i in range(3)]
    duo.until(lambda: all(one.answer.ends for one in asked))
    for one in asked:
        told: list[int] = []
        for src, dst, envelope in duo.frames:
            if (src, dst) != (DECODE, FRONT):
                continue
            if isinstance(envelope.body, Tokens):
                told += [run.start for run in token_runs(envelope.body) if run.room == one.room]
            elif isinstance(envelope.body, Finished) and envelope.body.room == one.room:
                assert envelope.body.usage.output_len == len(told)
        assert told == list(range(len(one.expected)))
        assert pack_u32(one.answer.tokens) == pack_u32(one.expected)
