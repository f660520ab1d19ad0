"""Workers on machines of their own, which are network namespaces, come and go by a list, as docs/operations.md says."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.e2e.machines import Network, commands_of
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Json, wait_until
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

    def known(self) -> dict[str, Json]:
        return {worker["name"]: worker for worker in self.admin.get("/admin/workers").json()["workers"]}

    def wait_used(self, name: str) -> None:
        def is_used() -> bool:
            worker = self.known().get(name, {})
            return worker.get("state") == "ready" and worker["status"] is not None and not worker["leaving"]

        wait_until(is_used, f"{name} to be used", self.processes["router"])


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
    is_over, num_right = Event(), [0] * NUM_USERS

    def use(user: int) -> None:
        while not is_over.is_set():
            assert stream_tokens(cluster, prompts[user], STREAM_LEN, lambda count: None) == rights[user]
            num_right[user] += 1

    def go_on(users: list[Future[None]]) -> None:
        """Until every user has had two more streams, of which one began later; at once when one has failed."""
        before = [count + 1 for count in num_right]

        def have_gone_on() -> bool:
            return any(user.done() for user in users) or all(map(int.__gt__, num_right, before))

        wait_until(have_gone_on, "streams", router)

    with ThreadPoolExecutor(NUM_USERS) as pool:
        users = [pool.submit(use, user) for user in range(NUM_USERS)]
        try:
            go_on(users)
            cluster.start_joiner()  # one joins,
            cluster.on_router(cluster.extended)
            cluster.wait_used(f"decode-{JOINER}:8998")
            go_on(users)
            former = f"decode@{ROLES['decode']}:8998"
            cluster.list.write_text(cluster.list.read_text().replace(f"{former}\n", ""))  # one leaves and ends,
            left = f"decode-{ROLES['decode']}:8998"
            wait_until(lambda: left not in cluster.known(), f"{left} to be forgotten", router)
            assert f"{left} has left" in router.log()
            assert cluster.processes["decode"].end() == 0
            go_on(users)
            cluster.start("decode")  # comes back,
            cluster.on_router(f"echo {former} >> workers")
            cluster.wait_used(left)
            cluster.processes["joiner"].kill()  # and the other one is killed.
            go_on(users)
        finally:
            is_over.set()
        for user in users:
            user.result()
    cluster.processes.pop("joiner")
    cluster.end()
