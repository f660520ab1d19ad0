"""One more token of each of some rooms, told by one list (Tokens.next): as if each had been told by itself."""

import pytest

from deltaserve.core.errors import FailReason
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import NextTokens, StreamPlace, Tokens
from tests.control.front.cluster import Cluster, room

DECODE = "decode-0"


def streaming(*numbers: int) -> Cluster:
    """Rooms that have each got token 1."""
    cluster = Cluster().all_ready()
    for number in numbers:
        cluster.submit(number)
        cluster.tokens(DECODE, number, 0, [1])
    return cluster


def tell(cluster: Cluster, places: dict[int, int], tokens: list[int], ahead: int = 0, epoch: int = 1) -> None:
    """`places`: room |-> start."""
    listed = tuple(StreamPlace(room(number), epoch, start) for number, start in places.items())
    cluster.say(DECODE, Tokens(next=NextTokens(places=listed, ahead=ahead, tokens=pack_u32(tokens))))


def test_each_room_gets_its_own_and_the_list_stays() -> None:
    cluster = streaming(1, 2)
    for ahead in range(3):
        tell(cluster, {1: 1, 2: 1}, [10 + ahead, 20 + ahead], ahead)
    assert (cluster.output(1), cluster.output(2)) == ((1, 10, 11, 12), (1, 20, 21, 22))


@pytest.mark.parametrize(("start", "epoch"), [(0, 1), (1, 0), (1, 7)])
def test_what_is_known_or_of_another_submit_changes_nothing(start: int, epoch: int) -> None:
    cluster = streaming(1, 2)
    tell(cluster, {1: start}, [1], epoch=epoch)
    assert cluster.output(1) == (1,)


def test_behind_a_gap_the_room_asks_again_and_the_others_go_on() -> None:
    cluster = streaming(1, 2)
    tell(cluster, {1: 3, 2: 1}, [9, 5])
    assert (cluster.output(1), cluster.output(2)) == ((1,), (1, 5))
    assert [submit.epoch for submit in cluster.submits(DECODE) if submit.room == room(1)] == [1, 2]


def test_a_room_that_is_unknown_harms_no_other() -> None:
    cluster = streaming(1)
    tell(cluster, {8: 1, 1: 1}, [9, 5])
    assert cluster.output(1) == (1, 5)


def test_a_token_that_contradicts_one_delivered_fails_its_room_only() -> None:
    cluster = streaming(1, 2)
    tell(cluster, {1: 0, 2: 1}, [2, 5])
    assert cluster.failure(1) is FailReason.INTERNAL
    assert cluster.output(2) == (1, 5)


def test_a_list_of_another_length_than_its_tokens_fails_the_rooms_on_it() -> None:
    cluster = streaming(1, 2)
    tell(cluster, {1: 1}, [2, 5])
    assert cluster.failure(1) is FailReason.INTERNAL
    cluster.tokens(DECODE, 2, 1, [3])
    assert cluster.output(2) == (1, 3)
