"""Workers whose ranks are on two machines each, which are network namespaces, started as docs/operations.md says."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import PAGE, STREAM_LEN, made_cluster
from tests.e2e.test_parity import check_batch, check_hits
from tests.e2e.two_machines import TwoMachines, second_of
from tests.patience import PATIENCE_S

SECTION = "### One worker on several machines", "prefill"


@pytest.fixture(
    scope="module",
    params=[pytest.param(("prefill",), marks=pytest.mark.slow), ("prefill", "decode")],
    ids=["prefill", "both"],
)
def divided(tiny_models: Path, request: pytest.FixtureRequest) -> Iterator[TwoMachines]:
    model, roles = tiny_models / "llama", request.param
    with made_cluster(lambda network, folder: TwoMachines(network, model, folder, SECTION, roles)) as cluster:
        cluster.start_all()
        yield cluster


def test_answers_are_those_of_transformers(divided: TwoMachines) -> None:
    check_hits(divided, divided.model_path, PAGE, True)
    check_batch(divided, divided.model_path, PAGE)
    divided.wait_quiet()


def test_what_listens_where(divided: TwoMachines) -> None:
    divided.check_listening()


@pytest.mark.parametrize("what", ["node", *(pytest.param(what, marks=pytest.mark.wide) for what in ("rank", "rank 0"))])
def test_what_is_killed_in_the_middle_of_a_stream(divided: TwoMachines, what: str) -> None:
    """The worker ends whole; node 0 is started by hand, as a node is that was killed, and the stream goes on."""
    role = divided.roles[-1]
    prompt = random_prompt(3 * PAGE + 1, seed=4)
    undisturbed = stream_tokens(divided, prompt, STREAM_LEN, lambda count: None)
    todo = [what]

    def on_token(count: int) -> None:
        if count >= 10 and todo:
            kill(divided, role, todo.pop())

    assert stream_tokens(divided, prompt, STREAM_LEN, on_token) == undisturbed
    wait_until(divided.is_ready, "readiness", divided.processes[role])
    assert_true(divided.model_path, prompt, divided.complete(prompt, 4))
    divided.wait_quiet()


def kill(cluster: TwoMachines, role: str, what: str) -> None:
    first, further = cluster.processes[role], cluster.processes[second_of(role)]
    if what == "rank 0":
        first.kill()
    elif what == "rank":
        [rank] = psutil.Process(further.popen.pid).children(recursive=True)
        rank.kill()
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
    else:
        further.kill()
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        cluster.start(second_of(role))
    cluster.start(role)


def test_a_machine_that_is_cut_off_is_given_up_and_joins_again(divided: TwoMachines) -> None:
    """Its processes live on, and no connection ends."""
    role = divided.roles[-1]
    first = divided.processes[role]
    with divided.machines[second_of(role)].swallowed():
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        divided.start(role)
    wait_until(divided.is_ready, "readiness", divided.processes[role])
    prompt = random_prompt(40, seed=5)
    assert_true(divided.model_path, prompt, divided.complete(prompt, 4))
    divided.wait_quiet()
