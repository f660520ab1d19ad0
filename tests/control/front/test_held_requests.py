"""Requests that come while a worker without which nothing is served is expected back: held within their deadlines."""

import pytest

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import PeerName, Role
from tests.control.front.cluster import COMPAT, Cluster, facts, generation, room, status

PAIR = ("prefill-0", "decode-0")


def refusal(cluster: Cluster, number: int) -> FailReason:
    with pytest.raises(RequestFailed) as caught:
        cluster.ask(number)
    return caught.value.reason


@pytest.mark.parametrize("names", [PAIR, ("unified-0",)], ids=["apart", "unified"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_request_waits_for_the_only_worker_of_its_kind(names: tuple[str, ...], which: int) -> None:
    cluster = Cluster(names).all_ready()
    cluster.die(names[which])
    assert cluster.ask(1) == []
    assert cluster.end(1) is None
    assert cluster.front.ready() is not None, "another front should get requests"
    assert cluster.front.refusal(cluster.now) is None
    assert cluster.front.limits(cluster.now) is not None
    cluster.run_until(40.0, heartbeats_of=[name for name in names if name != names[which]])
    cluster.reboot(names[which])
    cluster.hello(names[which])
    submits = cluster.submits(names[-1])
    assert [(s.room, s.epoch) for s in submits] == [(room(1), 1)]
    assert submits[0].remaining_ms == 19_000
    cluster.tokens(names[-1], 1, 0, [3])
    cluster.finished(names[-1], 1, output_len=1)
    assert cluster.output(1) == (3,)


def test_the_wait_for_a_worker_is_told_beside_the_time_to_the_first_token() -> None:
    cluster = Cluster().all_ready()
    cluster.die("decode-0")
    cluster.ask(1)
    cluster.run_until(cluster.now + 3.0, heartbeats_of=["prefill-0"])
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    cluster.run_until(cluster.now + 0.4, heartbeats_of=PAIR)
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.finished("decode-0", 1, output_len=1)
    usage = cluster.deltas[room(1)][-1].usage
    assert usage is not None
    assert usage.worker_wait_s == pytest.approx(4.0)
    assert usage.first_token_s == pytest.approx(4.4)


def test_a_wait_between_two_tokens_is_none_for_the_first() -> None:
    cluster = Cluster().all_ready()
    cluster.ask(1)
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.die("decode-0")
    cluster.run_until(cluster.now + 3.0, heartbeats_of=["prefill-0"])
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    cluster.tokens("decode-0", 1, 1, [4])
    cluster.finished("decode-0", 1, output_len=2)
    usage = cluster.deltas[room(1)][-1].usage
    assert usage is not None
    assert usage.worker_wait_s == 0.0


def test_both_may_be_away() -> None:
    cluster = Cluster().all_ready()
    for name in PAIR:
        cluster.die(name)
    assert cluster.ask(1) == []
    for name in PAIR:
        cluster.reboot(name)
        cluster.hello(name)
    assert len(cluster.submits("decode-0")) == 1


def test_a_held_request_ends_at_its_deadline_or_when_its_client_leaves() -> None:
    cluster = Cluster().all_ready()
    cluster.die("decode-0")
    cluster.ask(1, generation(1, deadline_s=2.0))
    cluster.ask(2)
    cluster.cancel(2)
    assert cluster.failure(2) is FailReason.CANCELLED
    cluster.run_until(2.1, heartbeats_of=["prefill-0"])
    assert cluster.failure(1) is FailReason.DEADLINE
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert cluster.submits("decode-0") == []


def test_what_is_held_is_bounded() -> None:
    cluster = Cluster(max_rooms=3, max_waiting_tokens=100).all_ready()
    cluster.die("decode-0")
    cluster.ask(1)
    cluster.ask(2)
    assert refusal(cluster, 3) is FailReason.OVERLOADED
    cluster.ask(4, generation(4, prompt_len=1))
    assert refusal(cluster, 5) is FailReason.OVERLOADED


def test_a_worker_that_cannot_be_reached_is_expected_for_a_while() -> None:
    """Nobody said that it ended, and nobody that it is started again. What waits for it ends with that."""
    cluster = Cluster().all_ready()
    cluster.run_until(29.0, heartbeats_of=["prefill-0"])
    assert cluster.ask(1) == []
    cluster.run_until(31.0, heartbeats_of=["prefill-0"])
    assert refusal(cluster, 2) is FailReason.NO_PEER
    assert cluster.failure(1) is FailReason.NO_PEER


def test_a_stream_that_has_begun_waits_until_its_deadline_for_a_worker_that_nobody_expects() -> None:
    cluster = Cluster().all_ready()
    cluster.ask(1)
    cluster.tokens("decode-0", 1, 0, [3])
    cluster.run_until(32.0, heartbeats_of=["prefill-0"])
    assert refusal(cluster, 2) is FailReason.NO_PEER
    assert cluster.end(1) is None


def test_nobody_waits_for_a_worker_that_was_never_there() -> None:
    cluster = Cluster()
    cluster.hello("prefill-0")
    assert refusal(cluster, 1) is FailReason.NO_PEER
    cluster.die("decode-0")
    assert refusal(cluster, 1) is FailReason.NO_PEER


def test_nobody_waits_for_a_worker_that_is_refused() -> None:
    cluster = Cluster().all_ready()
    cluster.die("decode-0")
    cluster.reboot("decode-0")
    cluster.hello("decode-0", compat=COMPAT | {"dtype": "bfloat16"})
    assert refusal(cluster, 1) is FailReason.NO_PEER


def test_nobody_waits_for_a_worker_that_leaves_until_it_is_started_again() -> None:
    cluster = Cluster().all_ready()
    cluster.say("decode-0", status(draining=True))
    assert refusal(cluster, 1) is FailReason.NO_PEER
    cluster.run_until(6.0, heartbeats_of=["prefill-0"])
    assert refusal(cluster, 1) is FailReason.NO_PEER
    cluster.die("decode-0")  # told by whoever starts it again
    assert cluster.ask(1) == []


def test_a_worker_that_changes_its_role_is_expected_in_the_new_one() -> None:
    cluster = Cluster(("prefill-0", "decode-0", "decode-1")).all_ready()
    for name in ("prefill-0", "decode-0", "decode-1"):
        cluster.say(name, status())
    cluster._take(cluster.front.change_role(PeerName("decode-1"), Role.PREFILL, 30.0)[1])
    cluster.say("decode-1", status(draining=True))
    cluster.die("decode-0")
    assert cluster.ask(1) == []
    assert cluster.front.refusal(cluster.now) is None


def test_a_prompt_too_long_for_the_worker_that_is_away_is_known_to_be_before() -> None:
    cluster = Cluster()
    cluster.hello("prefill-0")
    cluster.hello("decode-0", its_facts=facts(pool_pages=90))
    cluster.die("decode-0")
    limits = cluster.front.limits(cluster.now)
    assert limits is not None and limits.max_total_len == 360
    with pytest.raises(RequestFailed, match="limit 360") as caught:
        cluster.ask(1, generation(1, prompt_len=353))
    assert caught.value.reason is FailReason.TOO_LONG
    assert cluster.ask(2, generation(2, prompt_len=352)) == []
