"""What prefill keeps of the log-probabilities it told: up to what was acknowledged, for a while, within a bound."""

from deltaserve.control.engine.kept_logprobs import KEPT_S, KeptLogprobs
from deltaserve.core.ids import Attempt, PeerName, Room
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import PromptLogprobs

READER = PeerName("decode-0")
ONE, TWO = (READER, Room(b"1" * 16)), (PeerName("decode-1"), Room(b"2" * 16))
FIRST, SECOND = Attempt(1), Attempt(2)


def frames(*starts: int, num_positions: int = 4, num_top: int = 1) -> tuple[PromptLogprobs, ...]:
    value = TokenLogprobs(-1.0, ((3, -1.0),) * num_top)
    return tuple(PromptLogprobs(room=bytes(16), start=start, values=(value,) * num_positions) for start in starts)


def starts(told: tuple[PromptLogprobs, ...] | None) -> list[int] | None:
    return None if told is None else [frame.start for frame in told]


def test_they_are_told_again_from_where_they_lack() -> None:
    kept = KeptLogprobs()
    kept.keep(ONE, FIRST, frames(1, 5))
    kept.keep(ONE, FIRST, frames(9))
    assert starts(kept.again(ONE, FIRST, 5)) == [5, 9]
    assert starts(kept.again(ONE, FIRST, 6)) == [5, 9]
    assert starts(kept.again(ONE, FIRST, 13)) == []
    assert kept.num_numbers == 0
    kept.check_integrity()


def test_an_old_question_changes_nothing() -> None:
    kept = KeptLogprobs()
    kept.keep(ONE, FIRST, frames(1, 5))
    kept.again(ONE, FIRST, 5)
    assert starts(kept.again(ONE, FIRST, 1)) == [], "it said that it has those"
    assert starts(kept.again(ONE, FIRST, 5)) == [5]


def test_nobody_is_told_what_is_of_another_attempt_or_reader() -> None:
    kept = KeptLogprobs()
    kept.keep(ONE, FIRST, frames(1, 5))
    assert kept.again(ONE, SECOND, 1) is None
    assert kept.again(TWO, FIRST, 1) is None
    kept.keep(ONE, SECOND, frames(1))
    assert kept.again(ONE, FIRST, 1) is None
    assert kept.num_numbers == 8
    kept.check_integrity()


def test_beyond_the_bound_the_oldest_are_forgotten() -> None:
    kept = KeptLogprobs(max_numbers=16)
    kept.keep(ONE, FIRST, frames(1, 5))
    kept.keep(TWO, FIRST, frames(1))
    kept.check_integrity()
    assert kept.num_numbers == 16
    assert kept.again(ONE, FIRST, 1) is None
    assert starts(kept.again(ONE, FIRST, 5)) == [5]
    assert starts(kept.again(TWO, FIRST, 1)) == [1]
    kept.keep(TWO, SECOND, frames(1, num_positions=40))
    kept.check_integrity()
    assert (kept.num_numbers, kept.again(TWO, SECOND, 1)) == (0, None), "one frame alone may be too much"


def test_they_outlive_their_room_for_a_while() -> None:
    kept = KeptLogprobs()
    kept.keep(ONE, FIRST, frames(1))
    kept.expire({ONE: None}, 5.0)
    kept.expire({}, 5.0 + KEPT_S - 1)
    assert kept.num_numbers == 8
    kept.expire({}, 5.0 + KEPT_S)
    assert kept.num_numbers == 0
    kept.keep(TWO, FIRST, frames(1))
    kept.expire({}, 100.0)
    assert kept.num_numbers == 8, "of a room that came and went between two looks"


def test_a_reader_that_is_gone_is_forgotten() -> None:
    kept = KeptLogprobs()
    kept.keep(ONE, FIRST, frames(1))
    kept.keep(TWO, FIRST, frames(1))
    kept.forget_reader(READER)
    assert kept.again(ONE, FIRST, 1) is None
    assert kept.num_numbers == 8
    kept.check_integrity()
