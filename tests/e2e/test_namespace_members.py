"""Workers on machines of their own, which are network namespaces, come and go by a list, as docs/operations.md says."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machines import Network, commands_of
from tests.e2e.members import asking, wait_forgotten, wait_used
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_logged, wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import CHECKED, DOCUMENT, ROLES, Cluster, made_cluster

HEADING = "### A list on several machines"
JOINER = "10.0.0.5"
NUM_USERS = 3
STREAM_LEN = 120


class ListedCluster(Cluster):
    """The commands of the document; a worker more, and the list, which is changed by its commands."""

    def __init__(self, network: Network, model: Path, folder: Path) -> None:
        super().__init__(network, model, folder, {}, {"joiner": JOINER})
        self.commands = commands_of(DOCUMENT, HEADING)
        section = DOCUMENT.read_text().split(f"\n{HEADING}\n")[1]
        self.written, self.extended = (line for line in section.splitlines() if line.startswith(("printf", "echo")))

    @property
    def list(self) -> Path:
        return self.machines["router"].folder / "workers"

    def on_router(self, line: str) -> None:
        subprocess.run(["bash", "-ec", line], cwd=self.list.parent, check=True)

    def start_joiner(self) -> None:
        words = [str(self.model_path) if word == "MODEL" else word for word in self.commands[f"decode {JOINER}"]]
        self.processes["joiner"] = self.machines["joiner"].start("decode", *words, *CHECKED, name="decode")


@pytest.fixture
def listed(tiny_models: Path) -> Iterator[ListedCluster]:
    with made_cluster(lambda network, folder: ListedCluster(network, tiny_models / "llama", folder)) as cluster:
        yield cluster


def test_one_joins_one_leaves_one_is_killed_and_no_stream_is_lost(listed: ListedCluster) -> None:
    cluster = listed
    for role in ("prefill", "decode"):
        cluster.start(role)
    cluster.on_router(cluster.written)
    cluster.start("router")
    router = cluster.processes["router"]
    wait_until(cluster.is_ready, "readiness", router)
    prompts = [random_prompt(40 + 7 * seed, seed=seed) for seed in range(NUM_USERS)]
    for prompt in prompts:
        assert_true(cluster.model_path, prompt, cluster.complete(prompt, 4))
    rights = [stream_tokens(cluster, prompt, STREAM_LEN, lambda count: None) for prompt in prompts]

    def ask(user: int, number: int) -> None:
        assert stream_tokens(cluster, prompts[user], STREAM_LEN, lambda count: None) == rights[user]

    with asking(NUM_USERS, ask, router) as go_on:
        go_on(2)  # the second one began later
        cluster.start_joiner()  # one joins,
        cluster.on_router(cluster.extended)
        wait_used(cluster.admin, f"decode-{JOINER}:8998", router)
        go_on(2)
        former = f"decode@{ROLES['decode']}:8998"
        cluster.list.write_text(cluster.list.read_text().replace(f"{former}\n", ""))  # one leaves and ends,
        left = f"decode-{ROLES['decode']}:8998"
        wait_forgotten(cluster.admin, left, router)
        wait_logged(f"{left} has left", router)
        assert cluster.processes["decode"].end() == 0
        go_on(2)
        cluster.start("decode")  # comes back,
        cluster.on_router(f"echo {former} >> workers")
        wait_used(cluster.admin, left, router)
        cluster.processes["joiner"].kill()  # and the other one is killed.
        go_on(2)
    cluster.processes.pop("joiner")
    cluster.end()
