"""The production control planes in virtual time: right tokens, nothing left behind."""

import random

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32
from deltaserve.sim.cluster import VOCAB, Shape
from deltaserve.sim.process import Answer
from tests.sim.small_cluster import Cluster, oracle_output


def ask(cluster: Cluster, prompt: list[int], max_tokens: int) -> tuple[Answer, tuple[int, ...]]:
    answer = cluster.front.submit(cluster.generation(prompt, max_tokens))
    return answer, oracle_output(pack_u32(prompt), max_tokens, VOCAB, cluster.shape.pools)


def settle(cluster: Cluster, pairs: list[tuple[Answer, tuple[int, ...]]], limit_s: float = 60.0) -> None:
    """Everything ends right, once, and nothing is held afterwards."""
    world = cluster.world
    world.run(until=world.now + limit_s, done=lambda: all(a.ends for a, _ in pairs))
    for answer, expected in pairs:
        assert answer.error is None, answer.error
        assert tuple(answer.tokens) == expected
        assert (answer.ends, answer.finish) == (1, "length")
    world.run(until=world.now + 2.0)
    cluster.check()
    assert cluster.is_quiet()


@pytest.mark.parametrize("num_pools", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 31, 32])
def test_one_request_through_prefill_and_decode(prompt_len: int, num_pools: int) -> None:
    cluster = Cluster(Shape(num_pools=num_pools))
    cluster.warm_up()
    settle(cluster, [ask(cluster, list(range(1, prompt_len + 1)), 6)])


def test_unified_needs_no_prefill_worker() -> None:
    cluster = Cluster(Shape(num_prefill=0, num_decode=0, num_unified=1))
    cluster.warm_up()
    settle(cluster, [ask(cluster, list(range(20)), 10), ask(cluster, list(range(20)), 5)])


def test_a_second_turn_moves_only_the_delta() -> None:
    cluster = Cluster(Shape())
    cluster.warm_up()
    first = ask(cluster, list(range(1, 17)), 8)
    settle(cluster, [first])
    turn = [*range(1, 17), *first[1], 50, 51, 52]
    second = ask(cluster, turn, 4)
    settle(cluster, [second])
    usage = second[0].last.usage if second[0].last else None
    assert usage is not None
    assert usage.decode_cached_len == 20  # 16 + 7 computed output tokens, page floored
    prefill = cluster.world.workers[PeerName("prefill-0")].instance.metrics()
    payloads = 2 * 100
    pages = 4 + 2
    assert pages * 64 < prefill["deltaserve_transfer_bytes_sent_total"] < pages * 64 + payloads


def test_concurrent_cold_misses_move_a_prefix_once() -> None:
    cluster = Cluster(Shape())
    cluster.warm_up()
    shared = list(range(1, 33))
    pairs = [ask(cluster, [*shared, 60 + i, 70 + i], 4) for i in range(5)]
    settle(cluster, pairs)
    sent = cluster.world.workers[PeerName("prefill-0")].instance.metrics()["deltaserve_transfer_bytes_sent_total"]
    assert sent < (8 + 5) * 64 + 5 * 100


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_under_memory_pressure(seed: int) -> None:
    rng = random.Random(seed)
    shape = Shape(
        num_prefill=rng.choice([1, 2]),
        num_decode=rng.choice([1, 2]),
        page_size=rng.choice([1, 2, 4, 8]),
        num_pools=rng.choice([1, 2, 3]),
        window_len=rng.choice([1, 2, 5, 12, 100]),
        spare_pages=rng.choice([0, 2, 20]),
        prefill_pages=rng.choice([24, 40, 100]),
        decode_pages=rng.choice([24, 40, 100]),
        max_running=rng.choice([1, 2, 4, 8]),
        chunk_len=8 * rng.choice([1, 2]),
        reserve_len=rng.choice([0, 1, 4, 16]),
        extend_len=rng.choice([0, 4, 100]),
        radix_cache=rng.random() < 0.8,
    )
    cluster = Cluster(shape)
    cluster.warm_up()
    limit = min(min(shape.prefill_pages, shape.decode_pages) * shape.page_size, shape.context_len)
    documents = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, limit // 2))] for _ in range(3)]
    pairs = []
    for _ in range(25):
        document = rng.choice(documents)
        prompt = document[: rng.randrange(1, len(document) + 1)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(4))
        ]
        room = limit - len(prompt)
        pairs.append(ask(cluster, prompt, rng.randrange(1, min(room, 12) + 1)))
        cluster.world.run(until=cluster.world.now + rng.choice([0.0, 0.001, 0.01, 0.1]))
        cluster.check()
    settle(cluster, pairs)
