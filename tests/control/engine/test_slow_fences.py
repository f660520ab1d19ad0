"""Fences that take longer than a peer may be silent."""

from functools import partial

from deltaserve.core.ids import PeerName
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import act
from tests.sim.small_cluster import Cluster

DECODE = PeerName("decode-0")
PREFILLS = (PeerName("prefill-0"), PeerName("prefill-1"))


def test_slow_fences_do_not_follow_one_another_for_ever() -> None:
    """While one peer is fenced no endpoint attaches to another, which has answered and must not miss us."""
    shape = Shape(num_prefill=2, heartbeat_s=0.1, peer_lost_s=0.3, peer_lease_s=0.3, peer_suspect_s=0.2)
    cluster = Cluster(shape)
    cluster.warm_up()
    world = cluster.world
    for worker in world.workers.values():
        for rank in worker.ranks:
            rank.plane.fence_s = 1.7
    links = world.workers[DECODE].instance.links
    for name in PREFILLS:
        act(world.workers[DECODE], partial(links.fence, name))
        world.run(until=world.now + 1.0)
    world.run(until=world.now + 15.0)
    assert all(links.is_ready(name) for name in PREFILLS)
