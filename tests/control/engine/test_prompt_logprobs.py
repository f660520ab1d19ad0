"""Log-probabilities of a prompt come over another connection than its pages: in order; what is lost is repeated."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

import deltaserve.control.engine.rooms
from deltaserve.control.engine.kept_logprobs import KEPT_S, KeptLogprobs
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.sampling import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.codec import encode
from deltaserve.core.wire.messages import (
    MAX_LOGPROB_POSITIONS,
    AskLogprobs,
    Envelope,
    Failed,
    Offer,
    PromptLogprobs,
    Submit,
)
from deltaserve.sim.cluster import VOCAB
from deltaserve.sim.oracle import oracle_answer
from deltaserve.sim.process import Answer
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Delays, Duo

PROMPT = range(1, 31)


def ask(duo: Duo) -> Answer:
    generation = duo.cluster.generation(PROMPT, 3)
    sampling = generation.sampling.__class__(max_tokens=3, seed=1, temperature=0.0, prompt_logprobs=0)
    return duo.cluster.front.submit(replace(generation, sampling=sampling))


def told(duo: Duo, src: PeerName) -> list[float]:
    return [value.logprob for frame in duo.sent(PromptLogprobs, src) for value in frame.values]


def lose(is_lost: Callable[[PromptLogprobs | AskLogprobs], bool], num_times: int = 1) -> Delays:
    """A link between the workers that loses the first frames about log-probabilities that are so."""
    lost: list[PromptLogprobs | AskLogprobs] = []

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...] | None:
        body = envelope.body
        if dst == FRONT or not isinstance(body, PromptLogprobs | AskLogprobs):
            return None
        if len(lost) == num_times or not is_lost(body):
            return None
        lost.append(body)
        return ()

    return link


def served(duo: Duo, answer: Answer) -> None:
    duo.until(lambda: bool(answer.ends), limit_s=60.0)
    assert answer.error is None, answer.error
    assert len(answer.tokens) == 3
    assert [value.logprob for value in answer.prompt_logprobs] == EXPECTED
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
    assert duo.sent(AskLogprobs, DECODE)[-1].start == len(PROMPT)
    assert duo.prefill.logprobs.num_numbers == 0


@pytest.mark.parametrize("num_times", [1, 2], ids=["once", "and its repetition"])
@pytest.mark.parametrize("start", [1, 9, 25], ids=["first", "middle", "last"])
def test_a_lost_frame_is_asked_for_and_told_again(start: int, num_times: int) -> None:
    """It used to hang until the deadline; later it failed the attempt, and the prompt was computed again."""
    duo = Duo(link=lose(lambda frame: isinstance(frame, PromptLogprobs) and frame.start == start, num_times))
    served(duo, ask(duo))
    assert len(duo.sent(Submit, FRONT)) == 1
    assert not duo.sent(Failed)
    assert told(duo, DECODE) == EXPECTED
    assert duo.prefill.logprobs.num_numbers == 0


def test_a_lost_question_is_repeated() -> None:
    def is_first(frame: PromptLogprobs | AskLogprobs) -> bool:
        return isinstance(frame, AskLogprobs) or (frame.start == 9 and not duo.sent(AskLogprobs, DECODE))

    duo = Duo(link=lose(is_first, num_times=2))
    served(duo, ask(duo))
    assert [frame.start for frame in duo.sent(AskLogprobs, DECODE)][:2] == [9, 9]
    assert len(duo.sent(Submit, FRONT)) == 1


def test_a_lost_acknowledgement_leaves_them_in_memory_for_a_while_only() -> None:
    duo = Duo(link=lose(lambda frame: isinstance(frame, AskLogprobs)))
    answer = ask(duo)
    duo.until(lambda: bool(answer.ends))
    assert duo.prefill.logprobs.num_numbers == len(EXPECTED)
    duo.until(lambda: not duo.prefill.logprobs.num_numbers, limit_s=2 * KEPT_S)


def test_what_prefill_keeps_no_more_is_computed_again() -> None:
    duo = Duo(link=lose(lambda frame: isinstance(frame, PromptLogprobs) and frame.start == 1))
    duo.prefill.logprobs = KeptLogprobs(max_numbers=20)
    served(duo, ask(duo))
    assert duo.sent(Failed)
    assert len(duo.sent(Submit, FRONT)) == 2


def test_of_a_lost_link_they_are_computed_again() -> None:
    """Whatever is repeated is lost as well: the pages are not held for that for ever."""
    duo = Duo(link=lose(lambda frame: isinstance(frame, PromptLogprobs) and frame.start == 25, num_times=4))
    served(duo, ask(duo))
    assert {offer.attempt for offer in duo.sent(Offer, DECODE)} == {1, 2}


def test_a_chunk_of_many_positions_goes_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltaserve.control.engine.rooms, "MAX_LOGPROB_POSITIONS", 3)
    duo = Duo()
    served(duo, ask(duo))
    assert all(len(frame.values) <= 3 for src in (PREFILL, DECODE) for frame in duo.sent(PromptLogprobs, src))
    assert told(duo, DECODE) == EXPECTED


def test_the_longest_frame_may_be_sent() -> None:
    top = tuple((2**32 - 1 - i, -1.0 / 3.0) for i in range(MAX_LOGPROBS))
    values = (TokenLogprobs(-1.0 / 3.0, top),) * MAX_LOGPROB_POSITIONS
    frame = PromptLogprobs(room=bytes(16), start=2**32, values=values)
    assert encode(Envelope(src="prefill-0" * 4, src_boot=2**64 - 1, dst_boot=2**64 - 1, body=frame))


def test_a_request_that_goes_on_behind_a_token_is_told_its_prompts_alone() -> None:
    duo = Duo(link=lambda src, dst, envelope: () if isinstance(envelope.body, Submit) and src == FRONT else None)
    ask(duo)
    duo.until(lambda: bool(duo.sent(Submit, FRONT)))
    submit = duo.sent(Submit, FRONT)[0]
    output = oracle_answer(submit.prompt, submit.sampling, VOCAB).tokens[:1]
    duo.inject(DECODE, FRONT, msgspec.structs.replace(submit, prompt=submit.prompt + pack_u32(output)))
    duo.until(lambda: len(told(duo, DECODE)) >= len(EXPECTED))
    duo.run(1.0)
    assert told(duo, DECODE) == EXPECTED


def test_a_request_ends_whose_logprobs_never_come() -> None:
    """Tokens that are held back are no progress: the tries are counted from the last one that was delivered."""

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...] | None:
        return () if dst == FRONT and isinstance(envelope.body, PromptLogprobs) else None

    duo = Duo(link=link)
    answer = ask(duo)
    duo.until(lambda: answer.error is not None, limit_s=60.0)
    assert answer.error is not None
    assert answer.error.reason is FailReason.PEER_LOST
    assert len(duo.sent(Submit, FRONT)) < 10
