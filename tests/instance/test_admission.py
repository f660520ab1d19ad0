"""Who waits for whom: full decode workers, prompts computed ahead, leases of waiting rooms."""

from deltaserve.base.ids import PeerName
from deltaserve.request.status import PrefillState
from deltaserve.sim.cluster import Cluster, Shape
from deltaserve.wire.messages import Envelope, Grant, Starting
from tests.instance.duo import PREFILL, Duo


def no_grants(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...] | None:
    return () if isinstance(envelope.body, Grant) else None


def states(duo: Duo) -> list[PrefillState]:
    return [room.state for room in duo.prefill.rooms.values()]


def test_prompts_of_one_reader_are_announced_up_to_the_horizon() -> None:
    """Each is computed ahead into the tree; those beyond wait unannounced until one of them is granted."""
    duo = Duo(Shape(prefill_pages=200), link=no_grants)
    asked = [duo.ask([i, *range(50, 61)], 3) for i in range(8)]
    duo.run(0.4)
    assert states(duo) == [PrefillState.AHEAD] * 6 + [PrefillState.QUEUED] * 2  # 60 of 64 tokens by five of them
    assert len({starting.room for starting in duo.sent(Starting)}) == 6
    assert duo.held(PREFILL).owned == 0  # all other pages are in the tree
    duo.link = lambda src, dst, envelope: None
    duo.settle(*asked)


def test_a_prompt_computed_ahead_yields_its_memory_to_a_granted_one_and_is_a_hit_later() -> None:
    """The first grants are lost, so the pool fills with prompts computed ahead; a granted one must still fit."""
    duo = Duo(Shape(prefill_pages=12), link=no_grants)
    ahead = [duo.ask([i, *range(50, 65)], 3) for i in range(2)]
    duo.run(0.2)
    assert states(duo) == [PrefillState.AHEAD] * 2
    duo.link = lambda src, dst, envelope: None
    duo.serve(range(40, 80), 3)
    assert not all(asked.answer.ends for asked in ahead)
    duo.settle(*ahead)


def test_a_full_decode_worker_stalls_nobody_else() -> None:
    """One of two decode workers grants nothing: the rooms of the other one are computed and answered meanwhile."""
    full = PeerName("decode-0")

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...]:
        return () if src == full and isinstance(envelope.body, Grant) else (0.0005,)

    cluster = Cluster(Shape(num_decode=2, prefill_pages=30, decode_pages=200), link=link)
    cluster.warm_up()
    cluster.world.run(until=cluster.world.now + 0.2)
    decode = cluster.world.workers[full].instance
    answers = []
    for wave in range(2):  # the rooms of the full one have waited for seconds when the second wave comes
        answers += [cluster.front.submit(cluster.generation([wave, i, *range(50, 64)], 3)) for i in range(20)]
        cluster.world.run(until=cluster.world.now + 2.0)
    num_stuck = len(decode.serving.rooms)
    assert 10 < num_stuck < 30
    assert sum(answer.ends for answer in answers) == 40 - num_stuck
    assert all(answer.error is None for answer in answers)
