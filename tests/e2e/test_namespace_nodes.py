"""Workers whose ranks are on two machines each, which are network namespaces, started as docs/operations.md says."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.machines import Network, commands_of
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import CHECKED, DOCUMENT, PAGE, ROLES, STREAM_LEN, Cluster, made_cluster
from tests.e2e.test_parity import check_batch, check_hits
from tests.patience import PATIENCE_S

HEADING = "### One worker on several machines"
FURTHER = {"prefill": "10.0.0.5", "decode": "10.0.0.6"}
"""Role |-> address of its worker's other machine."""


def node_of(role: str) -> str:
    """Name of that machine."""
    return f"{role}-1"


class Divided(Cluster):
    """A cluster of which some workers have ranks on two machines each."""

    def __init__(self, network: Network, model: Path, folder: Path, roles: Sequence[str]) -> None:
        super().__init__(network, model, folder, {}, {node_of(role): FURTHER[role] for role in roles})
        self.roles = roles
        self._lines = commands_of(DOCUMENT, HEADING)

    def argv(self, name: str) -> list[str]:
        """The document's lines of prefill, for either role."""
        role, _, node = name.partition("-")
        if role not in self.roles:
            return super().argv(role)
        words = self._lines[f"prefill {FURTHER['prefill'] if node else ROLES['prefill']}"]
        own = {"MODEL": str(self.model_path), FURTHER["prefill"]: FURTHER[role], ROLES["prefill"]: ROLES[role]}
        own[f"{ROLES['prefill']}:5000"] = f"{ROLES[role]}:5000"
        return [role, *(own.get(word, word) for word in words), *CHECKED]

    def start_all(self) -> None:
        for name in (*ROLES, *map(node_of, self.roles)):
            self.start(name)
        wait_until(self.is_ready, "readiness", self.processes["router"])


@pytest.fixture(
    scope="module",
    params=[pytest.param(("prefill",), marks=pytest.mark.slow), ("prefill", "decode")],
    ids=["prefill", "both"],
)
def divided(tiny_models: Path, request: pytest.FixtureRequest) -> Iterator[Divided]:
    with made_cluster(
        lambda network, folder: Divided(network, tiny_models / "llama", folder, request.param)
    ) as cluster:
        cluster.start_all()
        yield cluster


def test_answers_are_those_of_transformers(divided: Divided) -> None:
    check_hits(divided, divided.model_path, PAGE, True)
    check_batch(divided, divided.model_path, PAGE)
    divided.wait_quiet()


def test_what_listens_where(divided: Divided) -> None:
    for role in divided.roles:
        assert divided.machines[role].listening() == {ROLES[role]}
        assert divided.machines[node_of(role)].listening() == {FURTHER[role]}


@pytest.mark.parametrize("what", ["rank", "node", "rank 0"])
def test_what_is_killed_in_the_middle_of_a_stream(divided: Divided, what: str) -> None:
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


def kill(cluster: Divided, role: str, what: str) -> None:
    first, further = cluster.processes[role], cluster.processes[node_of(role)]
    if what == "rank 0":
        first.kill()
    elif what == "rank":
        [rank] = psutil.Process(further.popen.pid).children(recursive=True)
        rank.kill()
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
    else:
        further.kill()
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        cluster.start(node_of(role))
    cluster.start(role)


def test_a_machine_that_is_cut_off_is_given_up_and_joins_again(divided: Divided) -> None:
    """Its processes live on, and no connection ends."""
    role = divided.roles[-1]
    first = divided.processes[role]
    with divided.machines[node_of(role)].swallowed():
        assert first.popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        divided.start(role)
    wait_until(divided.is_ready, "readiness", divided.processes[role])
    prompt = random_prompt(40, seed=5)
    assert_true(divided.model_path, prompt, divided.complete(prompt, 4))
    divided.wait_quiet()
