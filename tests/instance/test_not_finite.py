"""KV that is not finite fails the requests that read it, and is used by none after them."""

import pytest

from deltaserve.base.errors import FailReason
from deltaserve.base.ids import PeerName
from deltaserve.base.tokens import pack_u32
from deltaserve.sim.cluster import VOCAB, Cluster, Shape
from deltaserve.sim.oracle import oracle_output
from deltaserve.sim.process import Answer

PROMPT = list(range(1, 30))


def ask(cluster: Cluster, prompt: list[int]) -> Answer:
    answer = cluster.front.submit(cluster.generation(prompt, 4))
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: answer.ends > 0)
    return answer


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("unified", [False, True])
def test_an_early_chunk_that_is_not_finite_is_not_used_again(num_steps: int, unified: bool) -> None:
    name = PeerName("unified-0" if unified else "prefill-0")
    roles = (0, 0, 1) if unified else (1, 1, 0)
    cluster = Cluster(Shape(*roles, chunk_len=8))
    cluster.warm_up()
    worker = cluster.world.workers[name]
    answer = cluster.front.submit(cluster.generation(PROMPT, 4))
    cluster.world.run(
        until=cluster.world.now + 20.0,
        done=lambda: worker.instance.metrics()["deltaserve_steps_total"] >= num_steps,
    )
    worker.executor.spoil_next = True
    cluster.world.run(until=cluster.world.now + 20.0, done=lambda: answer.ends > 0)
    assert answer.error is not None
    assert answer.error.reason is FailReason.NUMERICAL
    for prompt in (PROMPT, [*PROMPT, 30, 31]):
        again = ask(cluster, prompt)
        assert again.error is None
        assert tuple(again.tokens) == oracle_output(pack_u32(prompt), 4, VOCAB)
    cluster.world.run(until=cluster.world.now + 2.0)
    cluster.check()
    assert cluster.is_quiet()
