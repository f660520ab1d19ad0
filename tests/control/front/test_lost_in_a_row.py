"""A stream goes on as long as its deadline and a worker allow; a request that ends each worker it meets does not."""

from collections.abc import Callable

import pytest

from deltaserve.core.errors import FailReason
from tests.control.front.cluster import Cluster, generation

DECODES = ("decode-0", "decode-1", "decode-2")
NAMES = ("prefill-0", *DECODES)
DEADLINE_S = 3000.0


def killed(cluster: Cluster, name: str) -> None:
    """Its process ends and is started again."""
    cluster.die(name)
    cluster.reboot(name)
    cluster.hello(name)


def rebooted(cluster: Cluster, name: str) -> None:
    """The same, told by nobody: it is found in a later life."""
    cluster.reboot(name)
    cluster.hello(name)


def silent(cluster: Cluster, name: str) -> None:
    """Nothing is heard of it, over a connection that stands; then it is back, as it was."""
    others = tuple(other for other in NAMES if other != name)
    cluster.run_until(cluster.now + 6.0, heartbeats_of=others)
    cluster.hello(name)


Loss = Callable[[Cluster, str], None]


def _begun() -> Cluster:
    cluster = Cluster(NAMES).all_ready()
    cluster.submit(1, generation(1, max_tokens=100, deadline_s=DEADLINE_S))
    return cluster


def _where(cluster: Cluster) -> str:
    found = [worker.name for worker in cluster.front.workers if cluster.front.rooms.on(worker.name)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("lose", [killed, rebooted, silent])
def test_a_stream_that_goes_forward_outlives_any_number_of_workers(lose: Loss) -> None:
    cluster = _begun()
    for position in range(12):
        cluster.tokens(_where(cluster), 1, position, [5])
        lose(cluster, _where(cluster))
        assert cluster.end(1) is None


@pytest.mark.parametrize("num_before", [0, 4])
@pytest.mark.parametrize("lose", [killed, rebooted])
def test_three_processes_that_end_without_a_token_between_them_are_its_doing(lose: Loss, num_before: int) -> None:
    cluster = _begun()
    for position in range(num_before):
        cluster.tokens(_where(cluster), 1, position, [5])
    for num_lost in range(3):
        assert cluster.end(1) is None, num_lost
        lose(cluster, _where(cluster))
    assert cluster.failure(1) is FailReason.PEER_LOST


def test_silence_is_nobody_s_doing() -> None:
    cluster = _begun()
    for _ in range(12):
        silent(cluster, _where(cluster))
        assert cluster.end(1) is None
    cluster.tokens(_where(cluster), 1, 0, [5])
    assert cluster.end(1) is None


def test_a_request_that_ends_a_worker_at_each_token_is_stopped() -> None:
    cluster = _begun()
    num_lost = 0
    while cluster.end(1) is None:
        cluster.tokens(_where(cluster), 1, num_lost, [5])
        killed(cluster, _where(cluster))
        num_lost += 1
    assert num_lost == 17
