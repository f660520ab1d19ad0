"""KV that is not finite: what was drawn from it is computed anew, and nobody reads it after that."""

import pytest

from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32
from deltaserve.sim.cluster import VOCAB, Shape
from deltaserve.sim.process import Answer, SimWorker
from deltaserve.sim.rank_memory import STAMP_BYTES, StampMemory
from tests.sim.small_cluster import Cluster, oracle_output

PROMPT = list(range(1, 30))


def ask(cluster: Cluster, prompt: list[int]) -> Answer:
    answer = cluster.front.submit(cluster.generation(prompt, 4))
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: answer.ends > 0)
    return answer


def is_right(answer: Answer, prompt: list[int]) -> bool:
    return answer.error is None and tuple(answer.tokens) == oracle_output(pack_u32(prompt), 4, VOCAB)


def ready(unified: bool) -> tuple[Cluster, SimWorker]:
    """A cluster, and who computes its prompts."""
    roles = (0, 0, 1) if unified else (1, 1, 0)
    cluster = Cluster(Shape(*roles, chunk_len=8))
    cluster.warm_up()
    return cluster, cluster.world.workers[PeerName("unified-0" if unified else "prefill-0")]


def num_steps(worker: SimWorker) -> float:
    return worker.instance.metrics()["deltaserve_steps_total"]


def check_later_requests(cluster: Cluster) -> None:
    for prompt in (PROMPT, [*PROMPT, 30, 31]):
        assert is_right(ask(cluster, prompt), prompt)
    cluster.world.run(until=cluster.world.now + 2.0)
    cluster.check()
    assert cluster.is_quiet()


@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("unified", [False, True])
def test_after_a_chunk_that_is_not_finite_the_prompt_is_computed_anew(steps_before: int, unified: bool) -> None:
    cluster, worker = ready(unified)
    answer = cluster.front.submit(cluster.generation(PROMPT, 4))
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: num_steps(worker) >= steps_before)
    worker.executor.spoil_next = True
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: answer.ends > 0)
    assert is_right(answer, PROMPT)
    assert cluster.front.core.counts["retried_numerical"] == 1
    check_later_requests(cluster)


@pytest.mark.parametrize("unified", [False, True])
def test_what_is_not_finite_twice_fails(unified: bool) -> None:
    cluster, worker = ready(unified)
    answer = cluster.front.submit(cluster.generation(PROMPT, 4))

    def spoiled() -> bool:
        worker.executor.spoil_next = True
        return answer.ends > 0

    cluster.world.run(until=cluster.world.now + 20.0, done=spoiled)
    assert answer.error is not None
    assert answer.error.reason is FailReason.NUMERICAL
    worker.executor.spoil_next = False
    check_later_requests(cluster)


@pytest.mark.parametrize("unified", [False, True])
def test_whoever_reads_what_a_request_left_behind_unproven_is_answered(unified: bool) -> None:
    """It ended before a token was drawn from its pages: nobody could know that they are not finite."""
    cluster, worker = ready(unified)
    generation = cluster.generation(PROMPT, 4)
    worker.executor.spoil_next = True
    cluster.front.submit(generation)
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: num_steps(worker) >= 1)
    cluster.front.cancel(generation.room, FailReason.CANCELLED)
    cluster.world.run(until=cluster.world.now + 1.0)
    check_later_requests(cluster)
    assert cluster.front.core.counts["retried_numerical"] == 1


def test_the_token_that_comes_with_pages_says_nothing_of_what_decode_had_itself() -> None:
    """If its own prefix is not finite it is met once, and by nobody after that."""
    cluster, _ = ready(unified=False)
    decode = cluster.world.workers[PeerName("decode-0")]
    ask(cluster, PROMPT[:20])
    spoil(decode)
    for prompt in (PROMPT, [*PROMPT, 30, 31], PROMPT[:25]):
        assert is_right(ask(cluster, prompt), prompt)
    assert len(decode.executor.not_finite) == 1


def spoil(worker: SimWorker) -> None:
    """All that stands in its memory."""
    assert isinstance(worker.memory, StampMemory)
    (arena,) = worker.memory.memory.values()
    for at in range(0, len(arena), STAMP_BYTES):
        arena[at : at + 8] = b"\xff" * 8
