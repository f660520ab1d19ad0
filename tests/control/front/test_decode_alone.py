"""Decode computes prompts itself while no prefill worker can, where it may (--conditional-prefill auto)."""

import pytest

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import TokenRun, Tokens, Usage
from tests.control.front.cluster import COMPAT, PAGE_SIZE, Cluster, facts, generation, other_facts, room, status

PAIR = ("prefill-0", "decode-0")


def weighing(names: tuple[str, ...] = PAIR) -> Cluster:
    return Cluster(names, conditional_prefill=True).all_ready()


def prefill_of(cluster: Cluster, number: int) -> str | None:
    """Prefill worker that the room's last Submit names."""
    named = [submit.prefill for name in cluster.boots for submit in cluster.submits(name) if submit.room[-1] == number]
    return None if named[-1] is None else named[-1].name


def test_new_requests_go_to_decode_alone_while_prefill_is_gone() -> None:
    cluster = weighing()
    cluster.die("prefill-0")
    assert cluster.front.ready() is None
    assert cluster.front.limits(cluster.now) is not None
    cluster.submit(1)
    assert prefill_of(cluster, 1) is None
    cluster.tokens("decode-0", 1, 0, [7])
    cluster.finished("decode-0", 1, output_len=1)
    assert cluster.output(1) == (7,)
    cluster.reboot("prefill-0")
    cluster.hello("prefill-0")
    cluster.submit(2)
    assert prefill_of(cluster, 2) == "prefill-0"


def test_where_prefill_computes_every_prompt_they_wait_for_it() -> None:
    cluster = Cluster(PAIR).all_ready()
    cluster.die("prefill-0")
    assert cluster.front.ready() is not None
    assert cluster.ask(1) == []


@pytest.mark.parametrize("reason", [FailReason.PEER_LOST, FailReason.TRANSFER_FAILED, FailReason.PEER_FENCED])
def test_what_the_only_prefill_worker_failed_decode_computes(reason: FailReason) -> None:
    cluster = weighing()
    cluster.submit(1)
    cluster.failed("decode-0", 1, reason, retryable=True)
    assert len(cluster.submits("decode-0")) == 2
    assert prefill_of(cluster, 1) is None


def test_another_prefill_worker_is_tried_before() -> None:
    cluster = weighing(("prefill-0", "prefill-1", "decode-0"))
    first = cluster.submit(1).prefill
    assert first is not None
    cluster.failed("decode-0", 1, FailReason.PEER_LOST, retryable=True)
    assert {first.name, prefill_of(cluster, 1)} == {"prefill-0", "prefill-1"}


def test_nobody_waits_for_a_prefill_worker_that_is_not_heard_of() -> None:
    cluster = weighing()
    cluster.run_until(1.6, heartbeats_of=["decode-0"])
    cluster.submit(1)
    assert prefill_of(cluster, 1) is None
    cluster.say("prefill-0", status())
    cluster.submit(2)
    assert prefill_of(cluster, 2) == "prefill-0"


def test_where_one_request_after_the_other_fails_decode_computes_until_a_pause_is_over() -> None:
    cluster = weighing()
    for number in range(1, 4):
        cluster.submit(number)
        assert prefill_of(cluster, number) == "prefill-0"
        cluster.failed("decode-0", number, FailReason.TRANSFER_FAILED, retryable=True)
    cluster.submit(4)
    assert prefill_of(cluster, 4) is None
    assert cluster.front.doubt(cluster.now) is None
    cluster.run_until(1.2, heartbeats_of=PAIR)
    cluster.submit(5)
    assert prefill_of(cluster, 5) == "prefill-0"


def test_a_server_that_never_had_a_pair_is_not_ready() -> None:
    """Prefill may be of another model, or with pages of another size: this must not look like a working server."""
    cluster = Cluster(PAIR, conditional_prefill=True)
    cluster.hello("decode-0")
    assert "prefill-0" in (cluster.front.ready() or "")
    cluster.hello("prefill-0", {**COMPAT, "fingerprint": "other"}, other_facts("other"))
    assert cluster.front.ready() is not None


def test_prefill_workers_that_left_are_not_missed() -> None:
    cluster = weighing()
    cluster.leave("prefill-0", grace_s=0.0)
    cluster.tick()
    assert [worker.name for worker in cluster.front.workers] == ["decode-0"]
    cluster.submit(1)
    assert prefill_of(cluster, 1) is None


def test_a_decode_worker_is_still_one_that_may_become_prefill() -> None:
    cluster = weighing(("prefill-0", "decode-0", "decode-1"))
    cluster.run_until(0.5, heartbeats_of=["prefill-0", "decode-0", "decode-1"])
    cluster.die("prefill-0")
    cluster._take(cluster.front.change_role(PeerName("decode-0"), Role.PREFILL, 1.0)[1])
    cluster.submit(1)
    assert [len(cluster.submits(name)) for name in ("decode-0", "decode-1")] == [0, 1]


def test_what_decode_cannot_hold_is_refused_as_ever() -> None:
    cluster = Cluster(PAIR, conditional_prefill=True)
    cluster.hello("prefill-0")
    cluster.hello("decode-0", its_facts=facts(pool_pages=11))
    cluster.die("prefill-0")
    with pytest.raises(RequestFailed, match="limit 44"):
        cluster.submit(1, generation(1, prompt_len=40, max_tokens=8))


@pytest.mark.parametrize(("prefill_s", "held"), [(0.0, 0), (0.5, 40)])
def test_what_decode_computed_prefill_is_not_expected_to_hold(prefill_s: float, held: int) -> None:
    cluster = weighing()
    keys = cluster.submit(1).keys
    usage = Usage(prompt_len=40, output_len=1, prefill_s=prefill_s)
    cluster.say("decode-0", Tokens(runs=(TokenRun(room=room(1), epoch=1, start=0, tokens=pack_u32([7]), usage=usage),)))
    residency = cluster.front.placer.residency
    assert residency.hit_len(PeerName("prefill-0"), keys, PAGE_SIZE, cluster.now) == held
    assert residency.hit_len(PeerName("decode-0"), keys, PAGE_SIZE, cluster.now) == 40
