"""Rooms that went elsewhere, or ended, while their worker was not there: it is told when it comes back."""

from tests.control.front.cluster import Cluster, room

PAIRS = ("prefill-0", "decode-0", "decode-1")
OTHERS = ("prefill-0", "decode-1")


def with_a_silent_worker() -> Cluster:
    """Rooms 1 and 2 were on decode-0, which was given up; room 3 is on decode-1."""
    cluster = Cluster(PAIRS, load_balance_method="round_robin").all_ready()
    for number, decode in enumerate(("decode-0", "decode-1", "decode-0", "decode-1"), 1):
        cluster.submit(number)
        assert cluster.submits(decode)[-1].room == room(number)
    cluster.run_until(5.2, heartbeats_of=OTHERS)
    assert not cluster.cancels("decode-0")
    return cluster


def cancelled(cluster: Cluster) -> list[bytes]:
    return [cancel.room for cancel in cluster.cancels("decode-0")]


def test_a_worker_that_was_given_up_and_comes_back_hears_at_once_which_rooms_it_lost() -> None:
    cluster = with_a_silent_worker()
    cluster.hello("decode-0")
    assert cancelled(cluster) == [room(1), room(3)]
    cluster.hello("decode-0")
    assert len(cancelled(cluster)) == 2
    cluster.tokens("decode-1", 1, 0, [5])
    assert cluster.output(1) == (5,)


def test_a_new_life_had_none_of_them() -> None:
    cluster = with_a_silent_worker()
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert cancelled(cluster) == []


def test_neither_had_the_next_life_of_one_that_died() -> None:
    cluster = with_a_silent_worker()
    cluster.die("decode-0")
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert cancelled(cluster) == []


def test_a_room_that_ended_meanwhile_is_ended_there() -> None:
    """With nobody to go to it kept its place: the client's leave could not be told."""
    cluster = Cluster().all_ready()
    cluster.submit(1)
    cluster.broken("decode-0")
    cluster.run_until(1.6, heartbeats_of=["prefill-0"])
    cluster.cancel(1)
    cluster.hello("decode-0")
    assert cancelled(cluster) == [room(1)]


def test_a_room_that_came_back_stays() -> None:
    cluster = with_a_silent_worker()
    cluster.now += 0.1
    cluster.die("decode-1")
    cluster.hello("decode-0")
    placed = {submit.room for submit in cluster.submits("decode-0")[2:]}
    assert placed == {room(number) for number in range(1, 5)}
    cluster.run_until(cluster.now + 0.5, heartbeats_of=["prefill-0", "decode-0"])
    last = {
        m.room: type(m).__name__ for m in (f.envelope.body for f in cluster.sent(to="decode-0")) if hasattr(m, "room")
    }
    assert set(last.values()) == {"Submit"}
