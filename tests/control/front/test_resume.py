"""Streams go on behind what was delivered: after a gap, over a new connection, elsewhere. Nothing is spliced."""

from dataclasses import replace

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import FailReason
from deltaserve.core.hints import Hint, HintOutcome, KvHints
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    PromptLogprobs,
    Submit,
    TokenRun,
    Tokens,
    Usage,
)
from tests.control.front.cluster import COMPAT, FRONT_BOOT, Cluster, facts, generation, room, status

TWO_AND_TWO = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def resume_of(submit: Submit) -> tuple[int, bytes, int]:
    """(number, delivered output, tokens of the client's prompt)."""
    return submit.epoch, submit.prompt[4 * submit.prompt_len :], submit.prompt_len


def old_tokens(cluster: Cluster, worker: str, epoch: int, start: int, values: list[int]) -> None:
    """What a worker says in answer to an earlier Submit."""
    cluster.say(worker, Tokens(runs=(TokenRun(room=room(1), epoch=epoch, start=start, tokens=pack_u32(values)),)))


def stream(cluster: Cluster, values: list[int]) -> None:
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, values)


def test_after_a_gap_decode_is_asked_for_what_was_lost() -> None:
    cluster = Cluster().all_ready()
    stream(cluster, [7, 8])
    cluster.tokens("decode-0", 1, 3, [10])
    assert resume_of(cluster.submits("decode-0")[-1]) == (2, pack_u32([7, 8]), 40)
    old_tokens(cluster, "decode-0", 1, 4, [11])  # on its way before decode heard of the gap
    assert cluster.output(1) == (7, 8)
    assert len(cluster.submits("decode-0")) == 2
    cluster.tokens("decode-0", 1, 2, [9, 10, 11])
    cluster.finished("decode-0", 1, output_len=5)
    assert cluster.output(1) == (7, 8, 9, 10, 11)
    assert cluster.failure(1) is None


def test_a_first_token_may_be_lost_as_well() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 2, [7])
    assert resume_of(cluster.submits("decode-0")[-1]) == (2, b"", 40)
    cluster.tokens("decode-0", 1, 0, [5, 6, 7])
    assert cluster.output(1) == (5, 6, 7)


def test_a_lost_tail_is_asked_for() -> None:
    cluster = Cluster().all_ready()
    stream(cluster, [7])
    cluster.finished("decode-0", 1, output_len=3)
    assert resume_of(cluster.submits("decode-0")[-1]) == (2, pack_u32([7]), 40)
    cluster.tokens("decode-0", 1, 1, [8, 9])
    cluster.finished("decode-0", 1, output_len=3)
    assert cluster.output(1) == (7, 8, 9)
    assert isinstance(cluster.end(1), OutputDelta)


def test_what_answers_an_earlier_submit_counts_no_more() -> None:
    """It was drawn before decode knew what the client has: it may continue something else."""
    cluster = Cluster().all_ready()
    stream(cluster, [7])
    cluster.tokens("decode-0", 1, 5, [12])
    old_tokens(cluster, "decode-0", 1, 1, [66])
    usage = Usage(prompt_len=40, output_len=1)
    cluster.say("decode-0", Finished(room=room(1), epoch=1, usage=usage, reason=FailReason.INTERNAL))
    assert cluster.output(1) == (7,)
    assert cluster.end(1) is None


def test_tokens_that_contradict_delivered_ones_are_an_error_never_a_splice() -> None:
    cluster = Cluster().all_ready()
    stream(cluster, [7, 8])
    cluster.tokens("decode-0", 1, 1, [99, 100])
    assert cluster.output(1) == (7, 8)
    assert cluster.failure(1) is FailReason.INTERNAL
    assert len(cluster.cancels("decode-0")) == 1


def test_over_a_new_connection_every_room_is_asked_for() -> None:
    cluster = Cluster().all_ready()
    stream(cluster, [7])
    cluster.submit(2)
    cluster.broken("decode-0")
    assert len(cluster.submits("decode-0")) == 2, "there is nobody to ask yet"
    cluster.say("decode-0", status())
    assert [(s.room, s.epoch) for s in cluster.submits("decode-0")[2:]] == [(room(1), 2), (room(2), 2)]
    cluster.say("decode-0", status())
    assert len(cluster.submits("decode-0")) == 4, "once"


def test_a_worker_that_lost_us_for_a_while_is_greeted_and_asked_for_what_it_has() -> None:
    """The front stood still: decode thinks it lost, but keeps its rooms for some seconds."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    stream(cluster, [7])
    cluster.say("decode-0", Heartbeat(is_ready=False))
    assert cluster.end(1) is None
    assert cluster.submits("decode-1") == []
    cluster.hello("decode-0")
    assert resume_of(cluster.submits("decode-0")[-1]) == (2, pack_u32([7]), 40)


@pytest.mark.parametrize("how", ["silence", "refusal"])
def test_one_that_does_not_come_back_is_done_without(how: str) -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    stream(cluster, [7])
    cluster.say("decode-0", Heartbeat(is_ready=False))
    if how == "silence":
        cluster.run_until(2.1, heartbeats_of=["prefill-0", "prefill-1", "decode-1"])
    else:
        cluster.say("decode-0", Hello(role="decode", compat=COMPAT | {"dtype": "other"}, facts=facts()), FRONT_BOOT)
    assert resume_of(cluster.submits("decode-1")[-1]) == (2, pack_u32([7]), 40)


@pytest.mark.parametrize("how", ["death", "silence", "reboot"])
def test_the_streams_of_a_lost_decode_worker_go_on_elsewhere(how: str) -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    stream(cluster, [7, 8])
    if how == "death":
        cluster.die("decode-0")
    elif how == "silence":
        cluster.run_until(5.1, heartbeats_of=["prefill-0", "prefill-1", "decode-1"])
    else:
        cluster.reboot("decode-0")
        cluster.hello("decode-0")
    assert resume_of(cluster.submits("decode-1")[-1]) == (2, pack_u32([7, 8]), 40)
    cluster.tokens("decode-1", 1, 2, [9])
    cluster.finished("decode-1", 1, output_len=3)
    assert cluster.output(1) == (7, 8, 9)


def test_a_stream_waits_for_the_only_decode_worker_to_come_back() -> None:
    cluster = Cluster().all_ready()
    stream(cluster, [7, 8])
    cluster.die("decode-0")
    assert cluster.end(1) is None
    cluster.run_until(4.0, heartbeats_of=["prefill-0"])
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert resume_of(cluster.submits("decode-0")[-1]) == (2, pack_u32([7, 8]), 40)


def test_a_stream_whose_new_worker_is_full_waits_and_is_not_refused() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    stream(cluster, [7])
    cluster.die("decode-0")
    cluster.failed("decode-1", 1, FailReason.OVERLOADED, retryable=True)
    assert cluster.end(1) is None
    cluster.run_until(1.6, heartbeats_of=["prefill-0", "prefill-1", "decode-1"])
    assert [s.epoch for s in cluster.submits("decode-1")] == [2, 3]


def test_an_answer_that_is_complete_is_not_continued() -> None:
    """Only decode's last word was lost with it."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1, generation(1, max_tokens=2))
    cluster.tokens("decode-0", 1, 0, [7, 8])
    cluster.die("decode-0")
    end = cluster.end(1)
    assert isinstance(end, OutputDelta) and end.usage is not None
    assert (end.finish, end.usage.output_len) == (FinishReason.LENGTH, 2)
    assert cluster.submits("decode-1") == []


def test_hints_of_an_answer_whose_decode_worker_was_lost_are_refused() -> None:
    """What the first token brought was said of a tree that is gone, and nobody else kept anything there."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1, replace(generation(1, max_tokens=2), hints=KvHints(prefetch=True, retain_ms=1000)))
    cluster.tokens("decode-0", 1, 0, [7, 8])
    cluster.die("decode-0")
    end = cluster.end(1)
    assert isinstance(end, OutputDelta) and end.usage is not None
    assert [answer.hint for answer in end.usage.hints] == [Hint.RETAIN, Hint.PREFETCH]
    assert {answer.outcome for answer in end.usage.hints} == {HintOutcome.REFUSED}
    assert all("lost" in answer.reason for answer in end.usage.hints)


def test_prompt_logprobs_that_were_told_are_not_asked_for_again() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1, generation(1, prompt_len=3, prompt_logprobs=0))
    values = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    cluster.say("decode-0", PromptLogprobs(room=room(1), start=1, values=values))
    cluster.tokens("decode-0", 1, 0, [7])
    cluster.die("decode-0")
    again = cluster.submits("decode-1")[0]
    assert (again.sampling.prompt_logprobs, resume_of(again)) == (None, (2, pack_u32([7]), 3))


def test_the_waiting_rooms_of_a_worker_are_placed_and_counted_like_others() -> None:
    cluster = Cluster().all_ready()
    for number in range(5):
        cluster.submit(number)
    cluster.die("decode-0")
    assert cluster.front.stats().rooms_without_worker == 5
    worker = cluster.front.workers.get(next(iter(cluster.boots)))
    assert worker is not None and (worker.own_rooms, worker.own_tokens) == (0, 0)
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert cluster.front.stats().rooms_without_worker == 0
    assert worker.own_rooms == 5
