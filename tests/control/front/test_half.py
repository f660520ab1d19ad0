"""Fronts that speak for one worker, where somebody else chooses pairs: what they wait for, and what they do not try."""

from dataclasses import replace

import pytest

from deltaserve.control.front import workers
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Boot, PeerName, Role
from deltaserve.core.wire.messages import Hello, PeerAddress, Submit
from tests.control.front.cluster import COMPAT, Cluster, generation, member, other_facts, room

DECODE = "decode-0"


def half(name: str) -> Cluster:
    """The worker's front, as it is by default: where it chose pairs itself, decode would compute short prompts."""
    return Cluster((name,), half=Role(name.split("-")[0]), conditional_prefill=True).all_ready()


def address(name: str) -> PeerAddress:
    return PeerAddress(name=name, url=f"tcp://127.0.0.1/{name}")


def ask(cluster: Cluster, number: int, prefill: str | None = "prefill-9", deadline_s: float = 60.0) -> list[Submit]:
    named = None if prefill is None else address(prefill)
    return cluster.ask(number, replace(generation(number, deadline_s=deadline_s), prefill=named))


def comes(cluster: Cluster, name: str = "prefill-9") -> None:
    """The worker that was named answers."""
    cluster.boots.setdefault(PeerName(name), Boot(900))
    cluster.hello(name)


def known(cluster: Cluster) -> set[str]:
    return {worker.name for worker in cluster.front.workers}


def test_a_front_is_ready_with_its_own_worker_alone() -> None:
    for name in ("prefill-0", DECODE):
        cluster = half(name)
        assert cluster.front.ready() is None
        assert cluster.front.refusal(cluster.now) is None
        assert cluster.front.limits(cluster.now) is not None
        cluster.die(name)
        assert name in (cluster.front.ready() or "")
    assert "no decode worker is known" in (Cluster((), half=Role.DECODE).front.ready() or "")


def test_a_request_waits_for_the_prefill_worker_that_it_names() -> None:
    cluster = half(DECODE)
    assert ask(cluster, 1) == []
    assert cluster.messages("prefill-9", Hello)
    comes(cluster)
    (submit,) = cluster.submits(DECODE)
    assert submit.prefill == address("prefill-9")
    assert submit.prefill_way is None
    cluster.tokens(DECODE, 1, 0, [3])
    cluster.finished(DECODE, 1, output_len=1)
    assert cluster.output(1) == (3,)


def test_no_other_prefill_worker_will_do() -> None:
    cluster = half(DECODE)
    ask(cluster, 1, "prefill-8")
    comes(cluster, "prefill-8")
    assert ask(cluster, 2) == []
    comes(cluster)
    assert [submit.prefill for submit in cluster.submits(DECODE)] == [address("prefill-8"), address("prefill-9")]


def test_one_that_does_not_answer_is_given_up_and_forgotten() -> None:
    cluster = half(DECODE)
    ask(cluster, 1)
    ask(cluster, 2)
    cluster.run_until(4.9, heartbeats_of=[DECODE])
    assert cluster.end(1) is None
    cluster.run_until(5.6, heartbeats_of=[DECODE])
    assert (cluster.failure(1), cluster.failure(2)) == (FailReason.NO_PEER, FailReason.NO_PEER)
    assert known(cluster) == {DECODE}
    assert ask(cluster, 3) == []
    comes(cluster)
    assert len(cluster.submits(DECODE)) == 1


def test_one_that_does_not_fit_is_given_up_as_well() -> None:
    cluster = half(DECODE)
    ask(cluster, 1)
    cluster.boots[PeerName("prefill-9")] = Boot(900)
    cluster.hello("prefill-9", compat={**COMPAT, "dtype": "bfloat16"})
    cluster.run_until(6.0, heartbeats_of=[DECODE, "prefill-9"])
    assert cluster.failure(1) is FailReason.NO_PEER


def test_the_deadline_counts_while_one_is_waited_for() -> None:
    cluster = half(DECODE)
    ask(cluster, 1, deadline_s=1.0)
    cluster.run_until(1.6, heartbeats_of=[DECODE])
    assert cluster.failure(1) is FailReason.DEADLINE


def test_the_address_of_one_that_is_there_stays() -> None:
    """A name server that says something else takes no healthy worker away."""
    cluster = half(DECODE)
    named = PeerAddress(name="prefill-9", url="tcp://127.0.0.2/prefill-9")
    ask(cluster, 1)
    cluster.ask(2, replace(generation(2), prefill=named))
    comes(cluster)
    assert [submit.prefill for submit in cluster.submits(DECODE)] == [named, named], "it is where it was found last"
    ask(cluster, 3)
    assert cluster.submits(DECODE)[-1].prefill == named


def test_a_name_of_another_role_is_refused() -> None:
    cluster = half(DECODE)
    with pytest.raises(RequestFailed) as caught:
        ask(cluster, 1, DECODE)
    assert caught.value.reason is FailReason.NO_PEER


def test_so_many_workers_are_named_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_WORKERS", 3)
    cluster = half(DECODE)
    ask(cluster, 1, "prefill-1")
    ask(cluster, 2, "prefill-2")
    with pytest.raises(RequestFailed) as caught:
        ask(cluster, 3, "prefill-3")
    assert caught.value.reason is FailReason.NO_PEER
    cluster.run_until(6.0, heartbeats_of=[DECODE])
    assert ask(cluster, 4, "prefill-3") == []


@pytest.mark.parametrize("reason", [FailReason.PEER_LOST, FailReason.TRANSFER_FAILED, FailReason.OVERLOADED])
def test_what_has_not_begun_is_not_tried_again(reason: FailReason) -> None:
    """Whoever chose the pair is told, and chooses again."""
    cluster = half(DECODE)
    ask(cluster, 1)
    comes(cluster)
    cluster.failed(DECODE, 1, reason, retryable=True)
    assert cluster.end(1) is not None
    assert len(cluster.submits(DECODE)) == 1


def test_a_dead_decode_worker_ends_what_has_not_begun_alone() -> None:
    cluster = half(DECODE)
    for number in (1, 2):
        ask(cluster, number)
        comes(cluster)
    cluster.tokens(DECODE, 1, 0, [3])
    cluster.die(DECODE)
    assert cluster.failure(2) is FailReason.PEER_LOST
    cluster.reboot(DECODE)
    cluster.hello(DECODE)
    again = cluster.submits(DECODE)[-1]
    assert (again.room, again.prefill) == (room(1), address("prefill-9"))
    cluster.tokens(DECODE, 1, 1, [4])
    cluster.finished(DECODE, 1, output_len=2)
    assert cluster.output(1) == (3, 4)


def test_a_probe_that_names_nobody_is_computed_by_decode_itself() -> None:
    cluster = half(DECODE)
    ask(cluster, 1)
    comes(cluster)
    ask(cluster, 2, None)
    assert cluster.submits(DECODE)[-1].prefill is None


def test_prefill_s_front_waits_for_its_worker_s_part() -> None:
    cluster = half("prefill-0")
    (submit,) = ask(cluster, 1, None)
    assert cluster.submits("prefill-0") == [submit]
    assert submit.prefill is None
    cluster.finished("prefill-0", 1)
    assert cluster.end(1) is not None
    assert cluster.failure(1) is None


@pytest.mark.parametrize("name", ["prefill-0", DECODE])
def test_nothing_waits_for_a_worker_that_is_expected_back(name: str) -> None:
    """The other half would have failed by then, and this one wait for it in vain."""
    cluster = half(name)
    cluster.die(name)
    with pytest.raises(RequestFailed, match=name) as failed:
        ask(cluster, 1, None)
    assert failed.value.reason is FailReason.NO_PEER
    cluster.reboot(name)
    cluster.hello(name)
    assert len(ask(cluster, 1, None)) == 1


def test_a_dead_prefill_worker_ends_the_wait() -> None:
    cluster = half("prefill-0")
    ask(cluster, 1, None)
    cluster.die("prefill-0")
    assert cluster.failure(1) is FailReason.PEER_LOST


def test_a_wait_that_is_given_up_is_told_to_the_worker() -> None:
    cluster = half("prefill-0")
    ask(cluster, 1, None)
    cluster.cancel(1)
    assert [cancel.room for cancel in cluster.cancels("prefill-0")] == [room(1)]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prefill_worker_of_another_revision_is_never_the_other_half(is_known: bool) -> None:
    """Whoever named it hears which value differs: at once, or when the worker had time to answer."""
    cluster, words = half(DECODE), "prefill-9: does not fit decode-0: fingerprint: here model-2, on decode-0 model"
    if not is_known:
        assert ask(cluster, 1) == []
    else:
        cluster.up(member("prefill-9"))
    cluster.boots[PeerName("prefill-9")] = Boot(900)
    cluster.hello("prefill-9", COMPAT | {"fingerprint": "model-2"}, other_facts("model-2"))
    if is_known:
        with pytest.raises(RequestFailed, match=words):
            ask(cluster, 1)
    else:
        cluster.run_until(8.0, heartbeats_of=(DECODE, "prefill-9"))
        assert cluster.failure(1) is FailReason.NO_PEER
        assert words in str(cluster.end(1))
    assert not cluster.submits(DECODE)
