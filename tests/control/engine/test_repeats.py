"""A Submit that comes again: decode tells what was missed, remembers answers, and waits for a quiet front."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest

from deltaserve.control.engine.ended import ANSWER_KEPT_S
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32, unpack_u32
from deltaserve.core.wire.messages import Envelope, Finished, PromptLogprobs, Submit, TokenRun, Tokens
from deltaserve.sim.cluster import VOCAB
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Asked, Duo, token_runs

PROMPT = list(range(1, 31))


@dataclass
class Cut:
    """A connection that carries nothing for a while."""

    pair: set[PeerName]
    duo: Duo | None = None
    since: float = 1e9
    until: float = 0.0

    def policy(self, src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        is_cut = {src, dst} == self.pair and self.duo is not None and self.since <= self.duo.world.now < self.until
        return () if is_cut else None

    def reset(self, duo: Duo, seconds: float) -> None:
        """What is on its way is lost, and so is everything for so long."""
        self.duo, self.since, self.until = duo, duo.world.now, duo.world.now + seconds
        one, other = sorted(self.pair)
        duo.world.reset(one, other)


def runs(duo: Duo, asked: Asked, since: int = 0) -> list[TokenRun]:
    sent = duo.sent(Tokens, DECODE)[since:]
    return [run for tokens in sent for run in token_runs(tokens) if run.room == asked.room]


def submit_of(duo: Duo, asked: Asked) -> Submit:
    return next(submit for submit in duo.sent(Submit, FRONT) if submit.room == asked.room)


def again(duo: Duo, asked: Asked, epoch: int, delivered: Sequence[int]) -> None:
    """The front sends its Submit again, with what it has."""
    first = submit_of(duo, asked)
    prompt = first.prompt + pack_u32(delivered)
    duo.inject(DECODE, FRONT, msgspec.structs.replace(first, epoch=epoch, prompt=prompt))


def half_way(duo: Duo, max_tokens: int = 20) -> Asked:
    asked = duo.ask(PROMPT, max_tokens)
    duo.until(lambda: len(asked.answer.tokens) >= max_tokens // 2)
    return asked


def test_a_room_that_runs_tells_again_what_was_missed() -> None:
    duo = Duo()
    asked = half_way(duo)
    told = len(duo.sent(Tokens, DECODE))
    again(duo, asked, 2, asked.expected[:3])
    duo.until(lambda: any(run.epoch == 2 for run in runs(duo, asked, told)))
    first = next(run for run in runs(duo, asked, told) if run.epoch == 2)
    assert first.start == 3
    assert tuple(unpack_u32(first.tokens)) == asked.expected[3 : 3 + len(first.tokens) // 4]
    assert len(first.tokens) // 4 >= 7


def test_the_same_submit_twice_changes_nothing() -> None:
    duo = Duo()
    asked = half_way(duo)
    again(duo, asked, 1, ())
    assert all(len(run.tokens) == 4 for run in runs(duo, asked))
    duo.settle(asked)
    told = len(duo.sent(Tokens, DECODE))
    again(duo, asked, 1, ())
    duo.run(1.0)
    assert len(duo.sent(Tokens, DECODE)) == told
    assert duo.decode_room(asked) is None


def test_a_room_with_other_output_is_opened_anew_behind_what_the_client_has() -> None:
    """Another worker went on with the answer meanwhile: this one's is of no use any more."""
    duo = Duo()
    asked = half_way(duo)
    other = [*asked.expected[:2], (asked.expected[2] + 1) % VOCAB]
    again(duo, asked, 2, other)
    room = duo.decode_room(asked)
    assert room is not None
    assert (room.epoch, room.first_own, room.request.output_len) == (2, 3, 3)
    assert tuple(unpack_u32(room.told().output)) == tuple(other)
    duo.until(lambda: any(run.epoch == 2 for run in runs(duo, asked)))
    assert next(run.start for run in runs(duo, asked) if run.epoch == 2) == 3


def test_an_answer_is_remembered_for_a_while_and_then_generated_anew() -> None:
    duo = Duo()
    asked = duo.serve(PROMPT, 6)
    ends = len(duo.sent(Finished, DECODE))
    again(duo, asked, 2, asked.expected[:4])
    duo.until(lambda: len(duo.sent(Finished, DECODE)) > ends)
    repeated = runs(duo, asked)[-1]
    assert (repeated.epoch, repeated.start, tuple(unpack_u32(repeated.tokens))) == (2, 4, asked.expected[4:])
    assert duo.decode_room(asked) is None
    duo.run(ANSWER_KEPT_S + 1.0)
    again(duo, asked, 3, asked.expected[:4])
    assert duo.decode_room(asked) is not None
    duo.until(lambda: any(run.epoch == 3 for run in runs(duo, asked)))
    first = next(run for run in runs(duo, asked) if run.epoch == 3)
    assert (first.start, unpack_u32(first.tokens)[0]) == (4, asked.expected[4])


def test_an_answer_is_not_told_again_where_the_prompts_logprobs_are_asked_for() -> None:
    """They are not remembered: an answer told again without them would be refused, and asked for again, for ever."""
    duo = Duo()
    asked = duo.serve(PROMPT, 6)
    first = submit_of(duo, asked)
    sampling = msgspec.structs.replace(first.sampling, prompt_logprobs=0)
    duo.inject(DECODE, FRONT, msgspec.structs.replace(first, epoch=2, sampling=sampling))
    assert duo.decode_room(asked) is not None
    duo.until(lambda: any(frame.room == asked.room for frame in duo.sent(PromptLogprobs, DECODE)))


def test_a_submit_without_anything_left_to_generate_is_refused() -> None:
    duo = Duo()
    asked = duo.serve(PROMPT, 3)
    duo.run(ANSWER_KEPT_S + 1.0)
    again(duo, asked, 2, asked.expected)
    duo.run(0.1)
    assert duo.sent(Finished, DECODE)[-1].reason is FailReason.BAD_EXTENT


@pytest.mark.parametrize("seconds", [0.3, 1.2, 4.0, 8.0], ids=["reset", "broken", "lost", "lost on both sides"])
def test_streams_outlive_a_connection_that_breaks(seconds: float) -> None:
    """The last two are longer than a worker is given: it counts as lost, and has the rooms still when it is back."""
    cut = Cut({FRONT, DECODE})
    duo = Duo(link=cut.policy)
    before = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(before.answer.ends))
    asked = [duo.ask([*PROMPT[: 3 * i], 70 + i], 30) for i in range(6)]
    duo.until(lambda: len(asked[0].answer.tokens) > 3)
    cut.reset(duo, seconds)
    duo.settle(*asked, limit_s=20.0)
    if seconds < 1.0:
        assert len(duo.sent(Submit, FRONT)) == 1 + 2 * len(asked), "each once more"


def test_a_front_that_stays_away_loses_its_rooms() -> None:
    cut = Cut({FRONT, DECODE})
    duo = Duo(link=cut.policy)
    asked = duo.ask(PROMPT, 60)
    duo.until(lambda: len(asked.answer.tokens) > 3)
    grace_s = duo.decode.config.options.front_grace_s
    duo.worker(DECODE).pace.slowness = 1e4  # or it would be done long before
    cut.reset(duo, 60.0)
    duo.world.run(until=duo.world.now + grace_s - 1.0)
    assert duo.decode_room(asked) is not None
    duo.world.run(until=duo.world.now + 3.0)
    assert duo.decode_room(asked) is None


def test_a_lost_prefill_worker_is_no_front() -> None:
    cut = Cut({DECODE, PREFILL})
    duo = Duo(link=cut.policy)
    asked = half_way(duo)
    cut.reset(duo, 8.0)
    duo.until(lambda: bool(asked.answer.ends))
    assert tuple(asked.answer.tokens) == asked.expected
