"""What the front makes of silence: whose, for how long, and whether it could have heard anything."""

import pytest

from deltaserve.control.peer.link import HangUp
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.wire.messages import Hello
from tests.control.front.cluster import COMPAT, Cluster, facts

PAIR = ("prefill-0", "decode-0")


@pytest.mark.parametrize(("is_broken", "seconds"), [(False, 5.0), (True, 1.5)], ids=["connected", "broken"])
def test_a_silent_worker_is_lost_sooner_when_its_connection_broke_and_found_again(
    is_broken: bool, seconds: float
) -> None:
    cluster = Cluster().all_ready()
    if is_broken:
        cluster.broken("prefill-0")
    cluster.run_until(seconds - 0.1, heartbeats_of=["decode-0"])
    assert cluster.front.ready() is None
    cluster.run_until(seconds + 0.1, heartbeats_of=["decode-0"])
    assert "prefill-0" in (cluster.front.ready() or "")
    assert [a for a in cluster.actions if isinstance(a, HangUp)] == [HangUp(PeerName("prefill-0"))]
    cluster.hello("prefill-0")  # it was only slow: same boot
    assert cluster.front.ready() is None


def test_a_worker_heard_of_over_its_next_connection_is_given_as_long_as_before() -> None:
    cluster = Cluster().all_ready()
    cluster.broken("prefill-0")
    cluster.run_until(0.4, heartbeats_of=PAIR)
    cluster.run_until(5.2, heartbeats_of=["decode-0"])
    assert cluster.front.ready() is None


def test_a_hello_to_a_former_life_of_the_front_is_a_sign_of_life_too() -> None:
    cluster = Cluster().all_ready()
    cluster.broken("decode-0")
    cluster.run_until(1.0, heartbeats_of=["prefill-0"])
    cluster.say("decode-0", Hello(role="decode", compat=COMPAT, facts=facts()), dst_boot=Boot(99))
    cluster.run_until(2.4, heartbeats_of=["prefill-0"])
    assert cluster.front.ready() is None


def test_a_front_that_stood_still_itself_blames_nobody() -> None:
    """Whoever spoke meanwhile was not heard."""
    cluster = Cluster().all_ready()
    cluster.run_until(1.0, heartbeats_of=PAIR)
    cluster.now += 60.0
    cluster.tick()
    assert cluster.front.ready() is None
    cluster.run_until(cluster.now + 4.4)
    assert cluster.front.ready() is None
    cluster.run_until(cluster.now + 0.7)
    assert cluster.front.ready() is not None


def test_a_worker_not_heard_of_gets_no_new_rooms_while_another_can_take_them() -> None:
    cluster = Cluster(("prefill-0", "prefill-1", "decode-0")).all_ready()
    cluster.run_until(1.6, heartbeats_of=["decode-0", "prefill-1"])
    assert {cluster.submit(number).prefill.name for number in range(4)} == {"prefill-1"}  # type: ignore[union-attr]
    cluster = Cluster().all_ready()
    cluster.run_until(1.6, heartbeats_of=["decode-0"])
    assert cluster.submit(1).prefill.name == "prefill-0"  # type: ignore[union-attr]


def test_a_tick_at_the_timer_always_moves_the_timer() -> None:
    """Whatever the clock's digits are: now - then >= 5 and now >= then + 5 differ in some cases."""
    for step in range(300):
        cluster = Cluster()
        cluster.now = step * 0.0717
        cluster.all_ready()
        for _ in range(8):
            cluster.now = max(cluster.now, cluster.front.next_timer())
            cluster.tick()
            assert cluster.front.next_timer() > cluster.now
