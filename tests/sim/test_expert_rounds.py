"""Decode workers that share experts, in virtual time: idle ones join, all wait for one that is missing or stopped."""

from dataclasses import replace

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.sim.cluster import Shape
from deltaserve.sim.expert_rounds import SimExpertGroup
from deltaserve.sim.faults import FaultKind
from deltaserve.sim.knobs import calm, draw_knobs
from deltaserve.sim.rig import simulate
from tests.sim.small_cluster import Cluster

SHAPE = Shape(num_decode=3, shares_experts=True)


def cluster() -> tuple[Cluster, SimExpertGroup]:
    """Its decode workers are one group."""
    made, group = Cluster(SHAPE), SimExpertGroup(3)
    for name, worker in made.world.workers.items():
        if name.startswith("decode"):
            worker.expert_group = group
            group.admit(worker)
    made.warm_up()
    return made, group


def test_idle_members_take_part_in_every_step() -> None:
    made, group = cluster()
    answer = made.front.submit(made.generation(list(range(20)), 6))
    made.world.run(until=made.world.now + 60.0, done=lambda: answer.ends > 0)
    assert answer.error is None
    steps = sum(w.instance.metrics()["deltaserve_steps_total"] for n, w in made.world.workers.items() if "decode" in n)
    assert group.num_joined == 2 * steps > 0


def test_all_wait_for_a_member_that_is_stopped() -> None:
    made, _ = cluster()
    answer = made.front.submit(made.generation(list(range(20)), 6))
    idle = made.world.workers[PeerName("decode-2")]
    idle.stop(3.0)
    began = made.world.now
    made.world.run(until=began + 60.0, done=lambda: answer.ends > 0)
    assert answer.error is None
    assert answer.ended_at - began > 3.0


@pytest.mark.parametrize("kind", [FaultKind.CRASH, FaultKind.CRASH_UNSEEN, FaultKind.DRAIN, FaultKind.PAUSE])
def test_requests_are_answered_whatever_befalls_a_member(kind: FaultKind) -> None:
    """Calm runs with a group, in which that alone happens, several times."""
    seeds = [seed for seed in range(1500) if draw_knobs(seed).shape.shares_experts][:12]
    num_struck = 0
    for seed in seeds:
        knobs = calm(draw_knobs(seed))
        report = simulate(seed, replace(knobs, events=tuple((number, kind) for number in (60, 120, 240, 400))))
        assert report.breach is None, (seed, report.breach)
        num_struck += report.faults[kind]
    assert num_struck >= len(seeds)
