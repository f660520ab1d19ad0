"""Rooms whose workers fail: who is tried next, and what the client is told."""

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.errors import FailReason
from deltaserve.core.wire.messages import FinishReason
from tests.control.front.cluster import Cluster, generation, room

TWO_AND_TWO = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_a_prefill_failure_is_tried_once_on_another_prefill_worker() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    first = cluster.submit(1)
    decode = "decode-0"
    assert first.prefill is not None and first.prefill.name == "prefill-0"
    cluster.now = 2.0
    cluster.failed(decode, 1, FailReason.TRANSFER_FAILED, retryable=True)
    second = cluster.submits(decode)[1]
    assert second.prefill is not None and second.prefill.name == "prefill-1"
    assert (second.room, second.prompt, second.keys) == (first.room, first.prompt, first.keys)
    assert second.remaining_ms == 58_000
    cluster.failed(decode, 1, FailReason.TRANSFER_FAILED, retryable=True)
    assert len(cluster.submits(decode)) == 2
    assert cluster.failure(1) is FailReason.TRANSFER_FAILED


def test_the_only_prefill_worker_gets_a_second_chance() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.failed("decode-0", 1, FailReason.PEER_FENCED, retryable=True)
    assert len(cluster.submits("decode-0")) == 2
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.finished("decode-0", 1, output_len=1)
    assert cluster.output(1) == (3,)


def test_fences_that_others_caused_are_outlived() -> None:
    """Two in a row, as where completions prove nothing and two clients leave: the third request is answered."""
    cluster = Cluster().all_ready()
    cluster.submit(1)
    for num_fences in range(1, 5):
        cluster.failed("decode-0", 1, FailReason.PEER_FENCED, retryable=True)
        cluster.run_until(cluster.now + 1.6, heartbeats_of=["decode-0", "prefill-0"])
        assert len(cluster.submits("decode-0")) == 1 + num_fences
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.finished("decode-0", 1, output_len=1)
    assert cluster.output(1) == (3,)


def test_without_a_prefill_worker_a_room_waits_for_one_to_come_back() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.die("prefill-0")
    assert cluster.end(1) is None, "a lost prefill worker is decode's matter"
    cluster.failed("decode-0", 1, FailReason.PEER_LOST, retryable=True)
    cluster.run_until(3.0, heartbeats_of=["decode-0"])
    assert len(cluster.submits("decode-0")) == 1
    cluster.reboot("prefill-0")
    cluster.hello("prefill-0")
    assert [s.epoch for s in cluster.submits("decode-0")] == [1, 2]
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.finished("decode-0", 1, output_len=1)
    assert cluster.output(1) == (3,)


@pytest.mark.parametrize("reason", [FailReason.PEER_LOST, FailReason.NO_PEER])
def test_a_prefill_worker_that_decode_does_not_reach_gets_time_to_be_missed_here_too(reason: FailReason) -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.failed("decode-0", 1, reason, retryable=True)
    assert len(cluster.submits("decode-0")) == 1
    cluster.run_until(0.9, heartbeats_of=["decode-0", "prefill-0"])
    assert len(cluster.submits("decode-0")) == 1
    cluster.run_until(1.6, heartbeats_of=["decode-0", "prefill-0"])
    assert len(cluster.submits("decode-0")) == 2
    for _ in range(2):
        cluster.failed("decode-0", 1, reason, retryable=True)
        cluster.run_until(cluster.now + 1.6, heartbeats_of=["decode-0", "prefill-0"])
    assert cluster.failure(1) is reason, "somewhere it ends"


def test_a_room_that_waits_for_a_worker_ends_at_its_deadline() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1, generation(1, deadline_s=3.0))
    cluster.die("decode-0")
    assert cluster.end(1) is None
    cluster.run_until(2.9, heartbeats_of=["prefill-0"])
    assert cluster.end(1) is None
    cluster.run_until(3.1, heartbeats_of=["prefill-0"])
    assert cluster.failure(1) is FailReason.DEADLINE
    assert len(cluster.front.rooms) == 0


def test_a_client_may_leave_or_have_enough_while_its_room_waits_for_a_worker() -> None:
    cluster = Cluster().all_ready()
    for number in (1, 2):
        cluster.submit(number)
        cluster.tokens("decode-0", number, 0, [5, 6])
    cluster.die("decode-0")
    cluster.cancel(1)
    cluster.finish(2, 1)
    assert cluster.failure(1) is FailReason.CANCELLED
    end = cluster.end(2)
    assert isinstance(end, OutputDelta) and end.finish is FinishReason.STOP
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert len(cluster.submits("decode-0")) == 2


def test_a_client_is_not_told_that_it_was_cancelled_when_workers_lost_track_of_its_request() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1)
    for _ in range(2):
        cluster.failed("decode-0", 1, FailReason.CANCELLED, retryable=True)
    assert cluster.failure(1) is FailReason.TRANSFER_FAILED


def test_what_would_fail_everywhere_is_not_tried_again() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(2)
    cluster.failed("decode-0", 2, FailReason.COMPUTE_FAILED)
    assert cluster.failure(2) is FailReason.COMPUTE_FAILED


@pytest.mark.parametrize("names", [TWO_AND_TWO, ("unified-0",)])
def test_output_that_is_not_finite_is_computed_anew_once(names: tuple[str, ...]) -> None:
    """The pages that were read may have been computed by another request, and are read no more."""
    cluster = Cluster(names).all_ready()
    cluster.submit(1)
    keeper = "unified-0" if "unified-0" in names else "decode-0"
    cluster.failed(keeper, 1, FailReason.NUMERICAL, retryable=True)
    assert len(cluster.submits(keeper)) == 2
    cluster.failed(keeper, 1, FailReason.NUMERICAL, retryable=True)
    assert cluster.failure(1) is FailReason.NUMERICAL


@pytest.mark.parametrize("how", ["death", "silence", "reboot"])
def test_a_lost_decode_worker_is_replaced_before_the_first_token(how: str) -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1)
    if how == "death":
        cluster.die("decode-0")
    elif how == "silence":
        cluster.run_until(5.1, heartbeats_of=["prefill-0", "prefill-1", "decode-1"])
    else:
        cluster.reboot("decode-0")
        cluster.hello("decode-0")
    assert [s.room for s in cluster.submits("decode-1")] == [room(1)]


def test_a_request_does_not_kill_its_way_through_all_workers() -> None:
    cluster = Cluster(("prefill-0", *(f"decode-{i}" for i in range(5)))).all_ready()
    cluster.submit(1)
    for number in range(3):
        assert cluster.end(1) is None
        cluster.die(f"decode-{number}")
    assert cluster.failure(1) is FailReason.PEER_LOST


def test_the_only_decode_worker_lost_is_waited_for() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.die("decode-0")
    assert cluster.end(1) is None
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert [s.epoch for s in cluster.submits("decode-0")] == [1, 2]


def test_a_decode_worker_back_from_a_pause_is_told_to_drop_what_it_lost() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1)
    cluster.run_until(5.1, heartbeats_of=["prefill-0", "prefill-1", "decode-1"])
    cluster.hello("decode-0")  # the same boot: it was only paused
    cluster.tokens("decode-0", 1, 0, [66])
    cluster.tokens("decode-1", 1, 0, [5])
    cluster.finished("decode-0", 1, output_len=1)
    cluster.finished("decode-1", 1, output_len=1)
    assert cluster.output(1) == (5,)
    assert [c.room for c in cluster.cancels("decode-0")] == [room(1)]


def test_a_full_decode_worker_passes_the_room_on_and_a_full_cluster_tells() -> None:
    cluster = Cluster(TWO_AND_TWO).all_ready()
    cluster.submit(1)
    cluster.failed("decode-0", 1, FailReason.OVERLOADED, retryable=True)
    assert len(cluster.submits("decode-1")) == 1
    cluster.failed("decode-1", 1, FailReason.OVERLOADED, retryable=True)
    assert cluster.failure(1) is FailReason.OVERLOADED


def test_capacity_is_not_asked_twice_of_the_same_pair() -> None:
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.failed("decode-0", 1, FailReason.OVERLOADED, retryable=True)
    assert len(cluster.submits("decode-0")) == 1
    assert cluster.failure(1) is FailReason.OVERLOADED


def test_a_failing_prefill_worker_is_left_alone_and_tried_again_later() -> None:
    cluster = Cluster(("prefill-0", "prefill-1", "decode-0")).all_ready()
    for number in range(3):
        first = cluster.submit(number)
        assert first.prefill is not None and first.prefill.name == "prefill-0"
        cluster.failed("decode-0", number, FailReason.TRANSFER_FAILED, retryable=True)
        cluster.tokens("decode-0", number, 0, [1])
        cluster.finished("decode-0", number, output_len=1)
    used = [s.prefill.name for s in (cluster.submit(10), cluster.submit(11)) if s.prefill]
    assert used == ["prefill-1", "prefill-1"]
    cluster.now = 1.1
    probe = cluster.submit(12)
    assert probe.prefill is not None and probe.prefill.name == "prefill-0"


def test_where_one_request_after_the_other_fails_it_is_told_until_the_next_may_try() -> None:
    """As behind a firewall between workers that lets links through and no pages."""
    cluster = Cluster().all_ready()
    for number in (1, 2):
        assert cluster.front.doubt(cluster.now) is None
        cluster.submit(number)
        for _ in range(2):
            cluster.failed("decode-0", number, FailReason.TRANSFER_FAILED, retryable=True)
        assert cluster.failure(number) is FailReason.TRANSFER_FAILED
    assert cluster.front.ready() is None, "it would be tried"
    assert cluster.front.doubt(cluster.now) == "prefill-0: one request after the other fails there"
    cluster.run_until(cluster.now + 2.1, heartbeats_of=["decode-0", "prefill-0"])
    assert cluster.front.doubt(cluster.now) is None
    cluster.submit(3)
    cluster.tokens("decode-0", 3, 0, [3])
    cluster.finished("decode-0", 3, output_len=1)
    assert cluster.front.doubt(cluster.now) is None
