"""A worker that leaves gets nothing new, gives up what it has when its grace is over, and is forgotten."""

import pytest

from deltaserve.control.front.events import WorkerUp
from deltaserve.control.front.workers import MOST_WORKERS
from deltaserve.control.peer.link import HangUp
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Hello
from tests.control.front.cluster import Cluster, generation, member, status

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def four(names: tuple[str, ...] = NAMES) -> Cluster:
    cluster = Cluster(names).all_ready()
    for name in names:
        cluster.say(name, status())
    return cluster


def known(cluster: Cluster) -> set[str]:
    return {worker.name for worker in cluster.front.workers}


def started(cluster: Cluster, number: int) -> tuple[str, str]:
    """A room of which two tokens came: on which decode worker, and which one it is not on."""
    cluster.submit(number)
    name = "decode-0" if cluster.submits("decode-0") else "decode-1"
    cluster.tokens(name, number, 0, [7, 8])
    return name, "decode-1" if name == "decode-0" else "decode-0"


def test_an_idle_worker_is_forgotten_at_once_and_hears_nothing_more() -> None:
    cluster = four()
    cluster.leave("decode-0")
    assert known(cluster) == {"prefill-0", "prefill-1", "decode-1"}
    assert HangUp(PeerName("decode-0")) in cluster.actions
    before = len(cluster.actions)
    cluster.say("decode-0", status())
    cluster.run_until(2.0, heartbeats_of=[*known(cluster), "decode-0"])
    assert cluster.sent(before, to="decode-0") == []
    for number in range(4):
        assert cluster.submit(number).prefill is not None
    assert len(cluster.submits("decode-1")) == 4


def test_a_room_may_end_where_it_is_within_the_grace() -> None:
    cluster = four()
    name, other = started(cluster, 1)
    cluster.leave(name, grace_s=5.0)
    cluster.submit(2)
    assert len(cluster.submits(other)) == 1
    cluster.run_until(4.0, heartbeats_of=NAMES)
    assert name in known(cluster)
    cluster.tokens(name, 1, 2, range(10, 16))
    cluster.finished(name, 1, 8)
    cluster.tick()
    assert name not in known(cluster)
    assert cluster.output(1) == (7, 8, *range(10, 16))


def test_behind_the_grace_it_goes_on_elsewhere_behind_what_came() -> None:
    cluster = four()
    name, other = started(cluster, 1)
    cluster.leave(name, grace_s=2.0)
    cluster.run_until(2.6, heartbeats_of=NAMES)
    assert len(cluster.cancels(name)) == 1
    (submit,) = cluster.submits(other)
    assert (submit.prompt_len, len(submit.prompt) // 4) == (40, 42)
    assert name not in known(cluster)
    assert cluster.failure(1) is None


def test_the_last_one_keeps_what_it_has() -> None:
    """There is nobody to take it: moving it would end it."""
    cluster = four(("prefill-0", "decode-0"))
    cluster.submit(1)
    cluster.tokens("decode-0", 1, 0, [7])
    cluster.leave("decode-0", grace_s=0.0)
    cluster.run_until(10.0, heartbeats_of=NAMES[::2])
    assert (cluster.cancels("decode-0"), cluster.failure(1)) == ([], None)
    assert cluster.front.ready() == "decode-0: leaving"
    cluster.tokens("decode-0", 1, 1, range(7))
    cluster.finished("decode-0", 1, 8)
    cluster.tick()
    assert known(cluster) == {"prefill-0"}
    assert cluster.front.ready() == "no decode worker is known"


def test_a_prompt_that_a_leaving_prefill_worker_computes_is_computed_elsewhere_behind_its_grace() -> None:
    cluster = four()
    submit = cluster.submit(1)
    assert submit.prefill is not None
    cluster.leave(submit.prefill.name, grace_s=1.0)
    cluster.run_until(0.9, heartbeats_of=NAMES)
    assert len(cluster.submits("decode-0") + cluster.submits("decode-1")) == 1
    cluster.run_until(1.6, heartbeats_of=NAMES)
    again = (cluster.submits("decode-0") + cluster.submits("decode-1"))[-1]
    assert again.prefill is not None and again.prefill.name != submit.prefill.name
    assert submit.prefill.name not in known(cluster)


def test_decode_workers_hear_which_prefill_workers_are_left() -> None:
    cluster = four()
    name, _ = started(cluster, 1)  # its prompt is computed: nothing keeps its prefill worker
    computed = cluster.submits(name)[0].prefill
    assert computed is not None
    before = len(cluster.actions)
    cluster.leave(computed.name)
    assert computed.name not in known(cluster)
    for decode in ("decode-0", "decode-1"):
        told = [hello for hello in cluster.messages(decode, Hello, before) if isinstance(hello, Hello)]
        assert [peer.name for peer in told[-1].peers] == [n for n in NAMES[:2] if n != computed.name]


def test_one_that_joins_again_is_used_again() -> None:
    cluster = four()
    name, _ = started(cluster, 1)
    cluster.leave(name, grace_s=0.5)
    cluster.up(member(name))
    cluster.run_until(3.0, heartbeats_of=NAMES)
    assert (cluster.cancels(name), known(cluster)) == ([], set(NAMES))
    cluster.leave("prefill-0")
    cluster.up(member("prefill-0"))
    cluster.up(member("prefill-0"))
    cluster.hello("prefill-0")
    cluster.say("prefill-0", status())
    prefills = {cluster.submit(n, generation(n, first_token=n)).prefill for n in range(10, 18)}
    assert {address.name for address in prefills if address is not None} == {"prefill-0", "prefill-1"}


def test_the_sooner_of_two_ends_of_its_grace_counts() -> None:
    cluster = four()
    name, other = started(cluster, 1)
    cluster.leave(name, grace_s=1.0)
    cluster.leave(name, grace_s=60.0)
    cluster.run_until(1.6, heartbeats_of=NAMES)
    assert len(cluster.submits(other)) == 1


@pytest.mark.parametrize("is_seen", [True, False])
def test_one_that_ends_while_it_leaves_is_a_death_as_any(is_seen: bool) -> None:
    cluster = four()
    name, other = started(cluster, 1)
    cluster.leave(name)
    if is_seen:
        cluster.die(name)
    else:
        cluster.run_until(8.0, heartbeats_of=[n for n in NAMES if n != name])
    assert len(cluster.submits(other)) == 1
    cluster.run_until(cluster.now + 1.0, heartbeats_of=[n for n in NAMES if n != name])
    assert name not in known(cluster)
    assert cluster.failure(1) is None


def test_there_is_a_most_of_them() -> None:
    cluster = four()
    for number in range(MOST_WORKERS - len(NAMES)):
        cluster.up(member(f"prefill-{number + 2}"))
    with pytest.raises(ValueError, match="at most 256 workers"):
        cluster.front.handle(WorkerUp(member("prefill-1000")), cluster.now)
    cluster.up(member("prefill-0"))
    cluster.leave("prefill-2")
    cluster.up(member("prefill-1000"))


def test_nobody_is_expected_back_that_left() -> None:
    cluster = four(("prefill-0", "decode-0"))
    cluster.leave("decode-0")
    assert cluster.front.refusal(cluster.now) is not None
    cluster.up(member("decode-0"))
    cluster.leave("decode-0")
    cluster.leave("nobody")
    with pytest.raises(Exception, match="no decode worker is known") as caught:
        cluster.submit(1)
    assert getattr(caught.value, "reason", None) is FailReason.NO_PEER
