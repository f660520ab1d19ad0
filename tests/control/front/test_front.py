"""A room's life in the front: submit, tokens, ends; and where it is placed."""

import json

import msgspec
import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import Boot
from deltaserve.core.keys import extend_keys, num_keys, seed_key
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import (
    Events,
    Finished,
    FinishReason,
    PromptLogprobs,
    Starting,
    TokenRun,
    Tokens,
    Usage,
)
from tests.control.front.cluster import FINGERPRINT, PAGE_SIZE, SECRET, Cluster, facts, generation, room, status

TWO_AND_TWO = ("prefill-0", "prefill-1", "decode-0", "decode-1")


# -------------------------------------------------------------------- an ordinary room


def test_a_room_from_submit_to_finish() -> None:
    cluster = Cluster().all_ready()
    submit = cluster.submit(1)
    assert submit.prefill is not None and submit.prefill.name == "prefill-0"
    assert (submit.room, submit.prompt, submit.remaining_ms) == (room(1), pack_u32(range(40)), 60_000)
    cluster.now = 0.5
    cluster.tokens("decode-0", 1, 0, [7])
    cluster.tokens("decode-0", 1, 1, [8, 9])
    cluster.finished("decode-0", 1, output_len=3)
    assert cluster.output(1) == (7, 8, 9)
    end = cluster.end(1)
    assert isinstance(end, OutputDelta) and end.usage is not None
    assert (end.finish, end.usage.output_len, end.usage.first_token_s) == (FinishReason.LENGTH, 3, 0.5)
    assert len(cluster.front.rooms) == 0


def test_page_keys_are_those_of_tenant_and_model() -> None:
    cluster = Cluster().all_ready()
    sample = generation(1, prompt_len=42)
    keys = cluster.submit(1, sample).keys
    seed = seed_key(SECRET, FINGERPRINT, PAGE_SIZE, sample.namespace)
    assert keys == extend_keys(seed, sample.prompt, PAGE_SIZE)
    assert num_keys(keys) == 10


def test_repeated_tokens_are_delivered_once() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    for start, values in ((0, [1]), (0, [1]), (0, [1, 2]), (1, [2, 3]), (0, []), (3, [4])):
        cluster.tokens("decode-0", 1, start, values)
    assert cluster.output(1) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "run",
    [
        TokenRun(room=room(1), epoch=1, start=0, tokens=b"abc"),
        TokenRun(room=room(1), epoch=1, start=-1, tokens=pack_u32([1])),
        TokenRun(room=room(1), epoch=1, start=0, tokens=pack_u32([1, 2]), logprobs=(TokenLogprobs(-0.1),)),
    ],
)
def test_malformed_tokens_fail_the_room_only(run: TokenRun) -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.submit(2)
    cluster.say("decode-0", Tokens(runs=(run, TokenRun(room=room(2), epoch=1, start=0, tokens=pack_u32([5])))))
    assert cluster.failure(1) is FailReason.INTERNAL
    assert cluster.output(2) == (5,)


def test_logprobs_are_cut_with_their_tokens() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(3))
    for end in (2, 3):
        run = TokenRun(room=room(1), epoch=1, start=0, tokens=pack_u32(range(end)), logprobs=logprobs[:end])
        cluster.say("decode-0", Tokens(runs=(run,)))
    assert [delta.logprobs for delta in cluster.deltas[room(1)]] == [logprobs[:2], logprobs[2:]]


# -------------------------------------------------------------------- prompt logprobs


def logprobs_from(start: int, end: int) -> PromptLogprobs:
    return PromptLogprobs(room=room(1), start=start, values=tuple(TokenLogprobs(-float(i)) for i in range(start, end)))


def test_prompt_logprobs_come_whole_and_before_the_first_token() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1, generation(1, prompt_len=10, prompt_logprobs=0))
    cluster.say("decode-0", logprobs_from(1, 4))
    cluster.tokens("decode-0", 1, 0, [5])  # overtook the rest
    assert cluster.output(1) == ()
    cluster.say("decode-0", logprobs_from(1, 6))
    cluster.say("decode-0", logprobs_from(6, 10))
    cluster.tokens("decode-0", 1, 1, [6])
    cluster.finished("decode-0", 1, output_len=2)
    values = [value.logprob for delta in cluster.deltas[room(1)] for value in delta.prompt_logprobs]
    assert values == [-float(i) for i in range(1, 10)]
    assert [bool(delta.tokens) for delta in cluster.deltas[room(1)]] == [False, False, False, True, True, False]
    assert cluster.output(1) == (5, 6)


@pytest.mark.parametrize("what", ["gap", "tail"])
def test_lost_prompt_logprobs_are_generated_anew_with_all_that_waited_for_them(what: str) -> None:
    """Decode keeps none: the room starts over, and what was told already is not told twice."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1, generation(1, prompt_len=10, prompt_logprobs=0))
    cluster.say("decode-0", logprobs_from(1, 5))
    cluster.tokens("decode-0", 1, 0, [5])
    if what == "gap":
        cluster.say("decode-0", logprobs_from(6, 8))
    else:
        cluster.finished("decode-0", 1, output_len=1)
    assert [c.room for c in cluster.cancels("decode-0")] == [room(1)]
    again = cluster.submits("decode-1")[0]
    assert (again.prompt_len, again.prompt) == (10, pack_u32(range(10)))
    assert again.sampling.prompt_logprobs == 0
    cluster.say("decode-1", logprobs_from(1, 10))
    cluster.tokens("decode-1", 1, 0, [5, 6])
    cluster.finished("decode-1", 1, output_len=2)
    values = [value.logprob for delta in cluster.deltas[room(1)] for value in delta.prompt_logprobs]
    assert values == [-float(i) for i in range(1, 10)]
    assert cluster.output(1) == (5, 6)


def test_prompt_logprobs_lost_again_and_again_are_a_failure() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1, generation(1, prompt_len=10, prompt_logprobs=0))
    for name in ("decode-0", "decode-1", "decode-0"):
        assert cluster.end(1) is None
        cluster.say(name, logprobs_from(2, 4))
    assert cluster.failure(1) is FailReason.PEER_LOST


# -------------------------------------------------------------------- the client ends it


def test_cancel_tells_decode_and_ends_the_room_once() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.cancel(1)
    cluster.cancel(1)
    assert cluster.failure(1) is FailReason.CANCELLED
    assert len(cluster.cancels("decode-0")) == 1
    cluster.failed("decode-0", 1, FailReason.CANCELLED)
    cluster.finished("decode-0", 1)


def test_decode_is_told_again_about_a_room_that_is_over_but_not_each_time() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.cancel(1)
    for start in range(5):
        cluster.tokens("decode-0", 1, start, [1])
    assert len(cluster.cancels("decode-0")) == 1
    cluster.now = 1.1
    for start in range(5, 10):
        cluster.tokens("decode-0", 1, start, [1])
    assert len(cluster.cancels("decode-0")) == 2
    assert cluster.output(1) == ()


def test_finish_keeps_what_the_client_wants_and_delivers_no_more() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, [1, 2, 3])
    cluster.finish(1, 2)
    cluster.finish(1, 2)
    cluster.tokens("decode-0", 1, 3, [4])
    assert [f.output_len for f in cluster.finishes("decode-0")] == [2]
    assert cluster.end(1) is None
    cluster.finished("decode-0", 1, output_len=2)
    assert cluster.output(1) == (1, 2, 3)
    assert isinstance(cluster.end(1), OutputDelta)


def test_finish_can_keep_only_what_was_delivered() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, [1])
    for output_len in (2, -1):
        with pytest.raises(ValueError, match=f"keep {output_len} of 1"):
            cluster.finish(1, output_len)
    cluster.finish(99, 5)  # over already: nothing to do


@pytest.mark.parametrize("how", ["death", "failure", "deadline"])
def test_a_finished_client_is_not_told_of_a_late_failure(how: str) -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1, generation(1, deadline_s=1.0))
    cluster.now = 0.25
    cluster.tokens("decode-0", 1, 0, [1, 2])
    cluster.finish(1, 1)
    if how == "death":
        cluster.die("decode-0")
    elif how == "failure":
        cluster.failed("decode-0", 1, FailReason.INTERNAL)
    else:
        cluster.run_until(1.1)
    end = cluster.end(1)
    assert isinstance(end, OutputDelta) and end.usage is not None
    assert (end.finish, end.usage.first_token_s) == (FinishReason.STOP, 0.25)


# -------------------------------------------------------------------- placing


def test_rooms_follow_their_prefix() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    sample = generation(1, prompt_len=400)
    keys = extend_keys(seed_key(SECRET, FINGERPRINT, PAGE_SIZE, sample.namespace), sample.prompt, PAGE_SIZE)
    for name in ("prefill-1", "decode-1"):
        cluster.say(name, Events(first=0, stored=keys, evicted=b"", snapshot=True))
    cluster.submit(1, sample)
    assert [s.prefill.name for s in cluster.submits("decode-1") if s.prefill] == ["prefill-1"]


UNEQUAL_PAGES = {"prefill-0": 16, "prefill-1": 8, "decode-0": 4, "decode-1": 8}


def unequal_cluster() -> Cluster:
    cluster = Cluster(UNEQUAL_PAGES)
    for name, page_size in UNEQUAL_PAGES.items():
        cluster.hello(name, its_facts=facts(page_size=page_size))
    return cluster


@pytest.mark.parametrize("decode", ["decode-0", "decode-1"])
def test_decode_gets_the_keys_of_its_own_pages(decode: str) -> None:
    cluster, other = unequal_cluster(), {"decode-0": "decode-1", "decode-1": "decode-0"}[decode]
    cluster.say(other, status(draining=True))
    sample = generation(1, prompt_len=43)
    keys = cluster.submit(1, sample).keys
    seed = seed_key(SECRET, FINGERPRINT, UNEQUAL_PAGES[decode], sample.namespace)
    assert keys == extend_keys(seed, sample.prompt, UNEQUAL_PAGES[decode])


@pytest.mark.parametrize(("prefill", "decode"), [("prefill-0", "decode-0"), ("prefill-1", "decode-0")])
def test_each_worker_holds_prefixes_in_pages_of_its_own(prefill: str, decode: str) -> None:
    """What one told in its size is worth as many tokens as what another told in a larger one."""
    cluster, sample = unequal_cluster(), generation(1, prompt_len=400)
    for name in (prefill, decode):
        size = UNEQUAL_PAGES[name]
        keys = extend_keys(seed_key(SECRET, FINGERPRINT, size, sample.namespace), sample.prompt, size)
        cluster.say(name, Events(first=0, stored=keys, evicted=b"", snapshot=True))
    for other in UNEQUAL_PAGES.keys() - {prefill, decode}:
        keys = extend_keys(seed_key(SECRET, FINGERPRINT, 4, sample.namespace), sample.prompt[:-800], 4)
        cluster.say(other, Events(first=0, stored=keys, evicted=b"", snapshot=True))
    cluster.submit(1, sample)
    assert [s.prefill.name for s in cluster.submits(decode) if s.prefill] == [prefill]


def test_a_burst_between_two_reports_spreads() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    for name in cluster.boots:
        cluster.say(name, status())
    used = [cluster.submit(n, generation(n, first_token=n)).prefill for n in range(10)]
    assert {p.name: used.count(p) for p in used if p} == {"prefill-0": 5, "prefill-1": 5}
    assert (len(cluster.submits("decode-0")), len(cluster.submits("decode-1"))) == (5, 5)


def test_a_burst_of_one_cold_prefix_goes_to_one_pair() -> None:
    """It is computed once, though no Events can tell of it yet."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    for name in cluster.boots:
        cluster.say(name, status())
    used = [cluster.submit(number, generation(number, prompt_len=800)) for number in range(4)]
    assert {submit.prefill.name for submit in used if submit.prefill} == {"prefill-0"}
    assert len(cluster.submits("decode-0")) == 4


def test_frames_a_front_has_no_use_for_change_nothing() -> None:
    cluster = Cluster().all_ready()
    before = len(cluster.actions)
    cluster.say("prefill-0", Starting(room=room(1), attempt=1, cached_len=0))
    cluster.say("decode-0", Finished(room=room(1), epoch=1, usage=Usage(prompt_len=1, output_len=0)))
    cluster.say("decode-0", status(), dst_boot=Boot(99))
    assert all(frame.peer == "decode-0" for frame in cluster.sent(before))
    assert cluster.front.counts["unexpected_messages"] == 1


def test_stats_can_be_shown_as_json() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.say("decode-0", status())
    cluster.submit(1)
    stats = json.loads(msgspec.json.encode(cluster.front.stats()))
    workers = stats["workers"]
    assert [w["name"] for w in workers] == list(TWO_AND_TWO)
    assert stats["rooms"] == 1 and stats["counts"] == {"submitted": 1}


def test_what_another_front_put_on_a_worker_counts() -> None:
    """This front has no rooms there: the reports are all it knows of them."""
    cluster = Cluster(TWO_AND_TWO).all_ready()
    idle = status()
    cluster.say("prefill-0", status(waiting_tokens=20_000))
    cluster.say("prefill-1", idle)
    cluster.say("decode-0", msgspec.structs.replace(idle, num_running=16, num_waiting=9))
    cluster.say("decode-1", idle)
    submit = cluster.submit(1)
    assert submit.prefill is not None and submit.prefill.name == "prefill-1"
    assert len(cluster.submits("decode-1")) == 1
