"""Log-probabilities of a prompt come over another connection than its pages: all, in order, or the attempt fails."""

from collections.abc import Callable
from dataclasses import replace

import pytest

import deltaserve.instance.rooms
from deltaserve.base.ids import PeerName
from deltaserve.base.sampling import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from deltaserve.base.tokens import pack_u32
from deltaserve.sim.cluster import VOCAB
from deltaserve.sim.oracle import oracle_answer
from deltaserve.sim.process import Answer
from deltaserve.wire.codec import encode
from deltaserve.wire.messages import MAX_LOGPROB_POSITIONS, Envelope, Failed, PromptLogprobs, Submit
from tests.instance.duo import DECODE, FRONT, PREFILL, Delays, Duo

PROMPT = range(1, 31)


def ask(duo: Duo) -> Answer:
    generation = duo.cluster.generation(PROMPT, 3)
    sampling = generation.sampling.__class__(max_tokens=3, seed=1, temperature=0.0, prompt_logprobs=0)
    return duo.cluster.front.submit(replace(generation, sampling=sampling))


def told(duo: Duo, src: PeerName) -> list[float]:
    return [value.logprob for frame in duo.sent(PromptLogprobs, src) for value in frame.values]


def lose(is_lost: Callable[[PromptLogprobs], bool]) -> Delays:
    """A link from prefill to decode that loses the first frame of log-probabilities that is so."""
    lost: list[PromptLogprobs] = []

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...] | None:
        body = envelope.body
        if src == PREFILL and isinstance(body, PromptLogprobs) and not lost and is_lost(body):
            lost.append(body)
            return ()
        return None

    return link


def served(duo: Duo, answer: Answer) -> None:
    duo.until(lambda: bool(answer.ends), limit_s=30.0)
    assert answer.error is None, answer.error
    assert len(answer.tokens) == 3
    duo.quiet()


EXPECTED = [
    value.logprob
    for value in oracle_answer(
        pack_u32(PROMPT), SamplingParams(max_tokens=1, seed=1, prompt_logprobs=0), VOCAB
    ).prompt_logprobs
]


def test_they_arrive_before_the_first_token() -> None:
    duo = Duo()
    served(duo, ask(duo))
    assert told(duo, DECODE) == EXPECTED
    assert not duo.sent(Failed)


@pytest.mark.parametrize("start", [1, 9, 25], ids=["first", "middle", "last"])
def test_a_lost_frame_fails_the_attempt_and_the_next_one_computes_them_anew(start: int) -> None:
    """It used to hang until the deadline, with all pages held."""
    duo = Duo(link=lose(lambda frame: frame.start == start))
    answer = ask(duo)
    served(duo, answer)
    assert len(duo.sent(Submit, FRONT)) == 2
    assert duo.world.now < 10.0


def test_a_chunk_of_many_positions_goes_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltaserve.instance.rooms, "MAX_LOGPROB_POSITIONS", 3)
    duo = Duo()
    served(duo, ask(duo))
    assert all(len(frame.values) <= 3 for src in (PREFILL, DECODE) for frame in duo.sent(PromptLogprobs, src))
    assert told(duo, DECODE) == EXPECTED


def test_the_longest_frame_may_be_sent() -> None:
    top = tuple((2**32 - 1 - i, -1.0 / 3.0) for i in range(MAX_LOGPROBS))
    values = (TokenLogprobs(-1.0 / 3.0, top),) * MAX_LOGPROB_POSITIONS
    frame = PromptLogprobs(room=bytes(16), start=2**32, values=values)
    assert encode(Envelope(src="prefill-0" * 4, src_boot=2**64 - 1, dst_boot=2**64 - 1, body=frame))
