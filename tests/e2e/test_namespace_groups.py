"""Expert groups whose members are on machines of their own, which are network namespaces, on both sides."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.machines import Network, commands_of
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import CHECKED, DOCUMENT, ROLES, STREAM_LEN, Cluster, made_cluster
from tests.patience import PATIENCE_S

HEADING = "### Workers that share experts, on several machines"
SECOND = {"prefill": "10.0.0.5", "decode": "10.0.0.6"}
"""Role |-> address of the second member of its group."""


class Groups(Cluster):
    """A group of two prefill workers and one of two decode workers, each of them on a machine."""

    def __init__(self, network: Network, model: Path, folder: Path) -> None:
        super().__init__(network, model, folder, {}, {f"{role}-1": address for role, address in SECOND.items()})
        self._lines = commands_of(DOCUMENT, HEADING)

    def argv(self, name: str) -> list[str]:
        """The document's lines of decode, for either role."""
        role, _, second = name.partition("-")
        if role == "router":
            argv = super().argv(role)
            argv[argv.index("--workers") + 1] = ",".join(self._entries())
            return argv
        words = self._lines[f"decode {SECOND['decode'] if second else ROLES['decode']}"]
        own = {"MODEL": str(self.model_path), SECOND["decode"]: SECOND[role], ROLES["decode"]: ROLES[role]}
        own[f"{ROLES['decode']}:5000"] = f"{ROLES[role]}:5000"
        return [role, *(own.get(word, word) for word in words), *CHECKED]

    def _entries(self) -> Sequence[str]:
        return [f"{role}@{address}:8998" for role in SECOND for address in (ROLES[role], SECOND[role])]

    def start_all(self) -> None:
        for name in (*ROLES, *(f"{role}-1" for role in SECOND)):
            self.start(name)
        wait_until(self.are_all_ready, "readiness", self.processes["router"])

    def are_all_ready(self) -> bool:
        return self.is_ready() and all(worker["state"] == "ready" for worker in self.workers().values())


@pytest.fixture(scope="module")
def groups(tiny_models: Path) -> Iterator[Groups]:
    with made_cluster(lambda network, folder: Groups(network, tiny_models / "qwen3_moe", folder)) as cluster:
        cluster.start_all()
        yield cluster


def test_answers_are_those_of_transformers(groups: Groups) -> None:
    """All at once: whoever has nothing to compute takes part in what the others do."""
    prompts = [random_prompt(40 + 7 * seed, seed) for seed in range(8)]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: groups.complete(prompt, 6), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(groups.model_path, prompt, answer)
    groups.wait_quiet()
    steps = {name: metrics["deltaserve_steps_total"] for name, metrics in groups.metrics().items() if "@" not in name}
    assert len(steps) >= 4
    for role in SECOND:
        assert groups.machines[role].listening() == {ROLES[role]}
        assert groups.machines[f"{role}-1"].listening() == {SECOND[role]}


def test_a_member_that_is_killed_in_the_middle_of_a_stream(groups: Groups) -> None:
    """Its group ends with it; both are started by hand, and the stream goes on."""
    prompt = random_prompt(13, seed=4)
    undisturbed = stream_tokens(groups, prompt, STREAM_LEN, lambda count: None)
    todo = ["decode-1"]

    def on_token(count: int) -> None:
        if count >= 10 and todo:
            groups.processes[todo.pop()].kill()
            assert groups.processes["decode"].popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
            groups.start("decode")
            groups.start("decode-1")

    assert stream_tokens(groups, prompt, STREAM_LEN, on_token) == undisturbed
    wait_until(groups.are_all_ready, "readiness", groups.processes["router"])
    assert_true(groups.model_path, prompt, groups.complete(prompt, 4))
    groups.wait_quiet()
