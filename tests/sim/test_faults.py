"""Deaths, cancels and lost frames in virtual time: true answers or errors, and nothing left behind."""

import random
from collections.abc import Sequence

import pytest

from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import WriteState
from deltaserve.core.wire.messages import Envelope, Hello
from deltaserve.sim.cluster import VOCAB, Shape
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from deltaserve.sim.process import Answer
from tests.sim.small_cluster import Cluster, oracle_output

Asked = tuple[Answer, tuple[int, ...]]


def ask(cluster: Cluster, prompt: list[int], max_tokens: int) -> Asked:
    answer = cluster.front.submit(cluster.generation(prompt, max_tokens))
    return answer, oracle_output(pack_u32(prompt), max_tokens, VOCAB)


def settle(cluster: Cluster, asked: Sequence[Asked], limit_s: float = 30.0) -> None:
    """Every request ended once, with the oracle's answer or a true prefix of it and an error; nothing is held."""
    world = cluster.world
    world.run(until=world.now + limit_s, done=lambda: all(a.ends for a, _ in asked))
    for answer, expected in asked:
        assert answer.ends == 1
        assert tuple(answer.tokens) == expected[: len(answer.tokens)]
        assert answer.error is not None or len(answer.tokens) == len(expected)
    world.run(until=world.now + 3.0)
    cluster.check()
    assert cluster.is_quiet()


def slow_fabric() -> Fabric:
    """Writes take 20 ms, in two parts."""
    return Fabric(policy=lambda posted: Fate(lands=(Part(0.01, 1), Part(0.02)), notified_s=0.021, told_s=0.022))


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("at_ms", range(0, 80, 4))
def test_a_worker_dies_and_comes_back(victim: str, at_ms: int) -> None:
    cluster = Cluster(Shape(), fabric=slow_fabric())
    cluster.warm_up()
    before = [ask(cluster, list(range(1, 30 + i)), 5) for i in range(4)]
    cluster.world.run(until=cluster.world.now + at_ms / 1000)
    cluster.world.kill(PeerName(victim))
    cluster.world.run(until=cluster.world.now + 0.5)
    cluster.start(PeerName(victim))
    settle(cluster, before)
    cluster.warm_up()
    after = [ask(cluster, list(range(1, 30 + i)), 5) for i in range(4)]
    settle(cluster, after)
    assert all(answer.error is None for answer, _ in after)


@pytest.mark.parametrize("at_ms", range(0, 100, 3))
def test_the_client_leaves_at_any_moment(at_ms: int) -> None:
    cluster = Cluster(Shape(), fabric=slow_fabric())
    cluster.warm_up()
    generation = cluster.generation(list(range(1, 40)), 20)
    answer = cluster.front.submit(generation)
    duplicate = ask(cluster, [*range(1, 40), 77], 5)
    cluster.world.run(until=cluster.world.now + at_ms / 1000)
    cluster.front.cancel(generation.room, FailReason.CANCELLED)
    settle(cluster, [duplicate])
    expected = oracle_output(generation.prompt, 20, VOCAB)
    assert tuple(answer.tokens) == expected[: len(answer.tokens)]
    again = ask(cluster, [*range(1, 40)], 6)
    settle(cluster, [again])
    assert again[0].error is None


@pytest.mark.parametrize("seed", range(30))
def test_late_landing_after_a_failed_write_never_reaches_another_request(seed: int) -> None:
    """Some writes report an error and land later all the same: only the fence makes their pages usable again."""
    rng = random.Random(seed)

    def policy(posted: Posted) -> Fate | None:
        roll = rng.random()
        if roll < 0.15:
            return Fate(lands=(Part(rng.random() * 0.5),), notified_s=None, told_s=0.005, told=WriteState.ERROR)
        if roll < 0.2:
            return None
        delay = rng.random() * 0.02
        return Fate(lands=(Part(delay),), notified_s=delay, told_s=delay)

    cluster = Cluster(Shape(num_prefill=2, decode_pages=32, prefill_pages=32), fabric=Fabric(policy=policy))
    cluster.warm_up()
    asked = []
    for _ in range(30):
        length = rng.randrange(1, 60)
        asked.append(ask(cluster, [rng.randrange(3) for _ in range(length)], rng.randrange(1, 8)))
        cluster.world.run(until=cluster.world.now + rng.random() * 0.05)
        cluster.check()
    settle(cluster, asked, limit_s=60.0)


@pytest.mark.parametrize("seed", range(30))
def test_frames_between_the_workers_get_lost(seed: int) -> None:
    """Offers, grants, revokes and their answers are lost or doubled; heartbeats too, now and then."""
    rng = random.Random(seed)

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float]:
        if "front" in (src, dst) or isinstance(envelope.body, Hello):
            return (0.0005,)
        roll = rng.random()
        if roll < 0.1:
            return ()
        return (0.0005, 0.001 + rng.random() * 0.01) if roll < 0.2 else (0.0005,)

    cluster = Cluster(Shape(), link=link, fabric=slow_fabric())
    cluster.warm_up()
    asked = []
    for _ in range(20):
        asked.append(ask(cluster, [rng.randrange(3) for _ in range(rng.randrange(1, 60))], rng.randrange(1, 8)))
        cluster.world.run(until=cluster.world.now + rng.random() * 0.1)
        cluster.check()
    settle(cluster, asked, limit_s=120.0)
    assert all(answer.error is None for answer, _ in asked)
