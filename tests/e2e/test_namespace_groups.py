"""Expert groups whose members are on machines of their own, which are network namespaces, on both sides."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import ROLES, STREAM_LEN, made_cluster
from tests.e2e.two_machines import SECOND, TwoMachines
from tests.patience import PATIENCE_S

SECTION = "### Workers that share experts, on several machines", "decode"
MEMBERS = ",".join(f"{role}@{address}:8998" for role in SECOND for address in (ROLES[role], SECOND[role]))


class Groups(TwoMachines):
    """A group of two prefill workers and one of two decode workers, each of them on a machine."""

    def argv(self, name: str) -> list[str]:
        argv = super().argv(name)
        if name == "router":
            argv[argv.index("--workers") + 1] = MEMBERS
        return argv


@pytest.fixture(scope="module")
def groups(tiny_models: Path) -> Iterator[Groups]:
    model, roles = tiny_models / "qwen3_moe", [*SECOND]
    with made_cluster(lambda network, folder: Groups(network, model, folder, SECTION, roles)) as cluster:
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
    groups.check_listening()


def test_the_router_knows_who_computes_together(groups: Groups) -> None:
    """Nobody but the members could tell it: each says where they meet."""
    told = [(worker["role"], worker["group"]) for worker in groups.workers().values()]
    prefill, decode = ({group for role, group in told if role == each} for each in ("prefill", "decode"))
    assert (len(told), len(prefill), len(decode)) == (4, 1, 1)
    assert prefill != decode
    assert None not in prefill | decode


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
