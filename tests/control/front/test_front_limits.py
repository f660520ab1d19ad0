"""Deadlines, shedding, draining: what the front refuses or ends by itself."""

import msgspec
import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import DeadlineTooShort, FailReason, RequestFailed
from tests.control.front.cluster import Cluster, generation, status


def refusal(cluster: Cluster, number: int = 1, deadline_s: float = 60.0) -> FailReason:
    before = len(cluster.actions)
    with pytest.raises(RequestFailed) as caught:
        cluster.submit(number, generation(number, deadline_s=deadline_s))
    assert cluster.actions[before:] == []
    cluster.front.check_integrity()
    return caught.value.reason


def test_the_deadline_ends_the_room_on_both_sides() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1, generation(1, deadline_s=2.0))
    cluster.run_until(1.99, heartbeats_of=("prefill-0", "decode-0"))
    assert cluster.end(1) is None
    cluster.run_until(2.0, heartbeats_of=("prefill-0", "decode-0"))
    assert cluster.failure(1) is FailReason.DEADLINE
    assert [c.reason for c in cluster.cancels("decode-0")] == [FailReason.DEADLINE]


def test_timers_of_ended_rooms_do_not_pile_up() -> None:
    """The bound is part of check_integrity, which runs after every step."""
    cluster = Cluster().all_ready()
    for number in range(300):
        cluster.submit(number, generation(number, deadline_s=600.0))
        cluster.cancel(number)


def test_remaining_time_is_rounded_up_and_never_zero() -> None:
    for deadline_s, expected in ((0.9991, 1000), (1e-6, 1)):
        cluster = Cluster().all_ready()
        assert cluster.submit(1, generation(1, deadline_s=deadline_s)).remaining_ms == expected


def test_a_full_front_sheds() -> None:
    cluster = Cluster(max_rooms=2).all_ready()
    cluster.submit(1)
    cluster.submit(2)
    assert refusal(cluster, 3) is FailReason.OVERLOADED
    cluster.cancel(1)
    cluster.submit(3)


def test_waiting_prompt_tokens_are_bounded() -> None:
    cluster = Cluster(max_waiting_tokens=100).all_ready()
    cluster.submit(1)
    cluster.submit(2)
    assert refusal(cluster, 3) is FailReason.OVERLOADED
    cluster.tokens("decode-0", 1, 0, [1])
    cluster.submit(3)


def test_a_wait_beyond_the_deadline_is_refused_at_once() -> None:
    cluster = Cluster().all_ready()
    cluster.say("prefill-0", status(waiting_tokens=10_000))  # 10 s at 1,000 tokens/s
    assert refusal(cluster, 1, deadline_s=5.0) is FailReason.OVERLOADED
    cluster.submit(1, generation(1, deadline_s=15.0))


def test_the_client_is_told_that_its_deadline_is_why() -> None:
    cluster = Cluster().all_ready()
    cluster.say("prefill-0", status(waiting_tokens=10_000))
    with pytest.raises(DeadlineTooShort, match=r"deadline is 5 s, and the estimated wait for its turn 10\.0 s"):
        cluster.submit(1, generation(1, deadline_s=5.0))


def test_nobody_is_refused_by_a_rate_that_was_only_assumed() -> None:
    """A worker that has computed little reports no rate: what is assumed of it orders workers, and refuses nobody."""
    cluster = Cluster(prefill_tokens_per_s=1.0, decode_step_s=10.0).all_ready()
    for name in ("prefill-0", "decode-0"):
        busy = msgspec.structs.replace(status(waiting_tokens=10_000), num_waiting=100, num_running=16)
        cluster.say(name, msgspec.structs.replace(busy, prefill_tokens_per_s=0.0, decode_step_s=0.0))
    cluster.submit(1, generation(1, deadline_s=5.0))
    assert cluster.end(1) is None


def test_what_a_report_tells_of_rooms_that_are_over_does_not_count() -> None:
    """A burst is over, and the workers' last reports are of its middle."""
    cluster = Cluster().all_ready()
    for number in range(128):
        cluster.submit(number, generation(number, first_token=100 * number))
    busy = msgspec.structs.replace(status(waiting_tokens=112 * 40), num_waiting=112, num_running=16, free_pages=(0,))
    cluster.say("decode-0", busy)
    cluster.say("prefill-0", status(waiting_tokens=112 * 40))
    assert refusal(cluster, 999, deadline_s=0.01) is FailReason.OVERLOADED
    for number in range(128):
        cluster.tokens("decode-0", number, 0, [1, 2])
        cluster.finished("decode-0", number, output_len=2)
    cluster.submit(1000, generation(1000, deadline_s=0.01))


def test_a_report_still_counts_the_rooms_of_other_fronts() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.say("decode-0", msgspec.structs.replace(status(), num_waiting=48, num_running=16))
    cluster.finished("decode-0", 1)
    assert refusal(cluster, 2, deadline_s=1.0) is FailReason.OVERLOADED


def test_rooms_that_want_few_tokens_are_not_taken_to_live_long() -> None:
    cluster = Cluster().all_ready()
    cluster.say("decode-0", status())  # a step takes 10 ms
    for number in range(17):
        cluster.submit(number, generation(number, max_tokens=8))
    cluster.submit(17, generation(17, deadline_s=0.1))
    for number in range(20, 40):
        cluster.submit(number, generation(number, max_tokens=1000))
    assert refusal(cluster, 40, deadline_s=0.1) is FailReason.OVERLOADED


def test_a_room_in_use_is_refused() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    assert refusal(cluster, 1) is FailReason.ROOM_IN_USE


def test_what_fits_nowhere_is_refused_with_the_numbers() -> None:
    cluster = Cluster().all_ready()
    with pytest.raises(RequestFailed, match="prompt of 2041 tokens, 2049 with the output, limit 2048") as caught:
        cluster.submit(1, generation(1, prompt_len=2041))
    assert caught.value.reason is FailReason.TOO_LONG
    cluster.submit(1, generation(1, prompt_len=2040))


def test_a_draining_front_takes_nothing_and_is_drained_after_its_last_room() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.front.drain()
    assert refusal(cluster, 2) is FailReason.DRAINING
    assert not cluster.front.is_drained()
    cluster.finished("decode-0", 1)
    assert cluster.front.is_drained()


# -------------------------------------------------------------------- lost frames

PAIR = ("prefill-0", "decode-0")


def test_a_room_decode_is_silent_about_is_submitted_again_twice_as_late_each_time() -> None:
    cluster = Cluster().all_ready()
    first = cluster.submit(1)
    cluster.run_until(40.0, heartbeats_of=PAIR)
    again = cluster.submits("decode-0")[1:]
    assert [submit.remaining_ms for submit in again] == pytest.approx([55_000, 45_000, 25_000], abs=600)
    assert {(s.room, s.prompt, s.keys, s.prefill) for s in again} == {
        (first.room, first.prompt, first.keys, first.prefill)
    }
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.finished("decode-0", 1, output_len=1)
    assert cluster.output(1) == (3,)


def test_a_room_decode_tells_of_is_not() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1, generation(1, max_tokens=100))
    for second in range(1, 40):
        cluster.run_until(float(second), heartbeats_of=PAIR)
        cluster.tokens("decode-0", 1, second - 1, [second])
    assert len(cluster.submits("decode-0")) == 1


def test_an_end_that_was_lost_is_found_again_and_nothing_is_delivered_twice() -> None:
    """Decode has forgotten the room, generates it again, and every token is the one it was."""
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, [1, 2])
    cluster.run_until(6.0, heartbeats_of=PAIR)
    assert len(cluster.submits("decode-0")) == 2
    cluster.tokens("decode-0", 1, 0, [1, 2, 3])
    cluster.finished("decode-0", 1, output_len=3)
    assert cluster.output(1) == (1, 2, 3)
    assert isinstance(cluster.end(1), OutputDelta)


def test_a_client_that_has_all_it_wants_does_not_wait_for_a_lost_end() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, [1, 2])
    cluster.finish(1, 1)
    cluster.run_until(6.0, heartbeats_of=PAIR)
    assert isinstance(cluster.end(1), OutputDelta)
    assert len(cluster.cancels("decode-0")) == 1
    assert len(cluster.submits("decode-0")) == 1
