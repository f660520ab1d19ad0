"""TP 4 to DEP 4, and DEP 4 to DEP 4: eight processes, two on each of four machines, which are network namespaces."""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import psutil
import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.machines import Network, commands_of
from tests.e2e.members import asking
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Answer, wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import DOCUMENT, PAGE, PAGES, ROLES, Cluster, made_cluster
from tests.e2e.two_machines import SECOND
from tests.patience import PATIENCE_S

HEADING = "### TP 4 to DEP 4, on several machines"
SIZE = 4
SIZES = (*PAGES, "--chunked-prefill-size", "16", "--num-pages", "2048", "--num-threads", "1", "--verify", "crc")
NUM_PROMPTS, NUM_USERS, STREAM_LEN = 8, 4, 200


class Compared(Cluster):
    """One of the two arrangements. `prefill-N`, `decode-N`: node N of prefill or decode."""

    def __init__(self, network: Network, model: Path, folder: Path, prefill: str) -> None:
        """`prefill`: "TP 4", as the document has it, or "DEP 4", by the lines of decode."""
        super().__init__(network, model, folder, {}, {f"second-{role}": address for role, address in SECOND.items()})
        written = commands_of(DOCUMENT, HEADING)
        lines = {
            role: [words for name, words in written.items() if name.startswith(f"{role} ")]
            for role in ("router", *SECOND)
        }
        self.is_worker_of_ranks = prefill == "TP 4"
        if not self.is_worker_of_ranks:
            lines["prefill"] = [[_for_prefill(word) for word in words] for words in lines["decode"]]
            [router] = lines["router"]
            lines["router"] = [[_with_groups(word) for word in router]]
        self._lines = {
            role if role == "router" else f"{role}-{number}": [role, *words]
            for role, of_one in lines.items()
            for number, words in enumerate(of_one)
        }

    def names(self, role: str) -> list[str]:
        return [name for name in self._lines if name.startswith(role)]

    def argv(self, role: str) -> list[str]:
        """`role`: name of a process."""
        flags = PAGES if role == "router" else SIZES
        return [str(self.model_path) if word == "MODEL" else word for word in self._lines[role]] + [*flags]

    def start(self, role: str) -> None:
        argv = self.argv(role)
        address = argv[argv.index("--host") + 1]
        [machine] = (machine for machine in self.machines.values() if machine.address == address)
        self.processes[role] = machine.start(*argv, name=role)

    def num_retried(self) -> int:
        """How often a room has lost a worker."""
        counts = self.info()["engine"]["counts"]
        return sum(count for cause, count in counts.items() if cause.startswith("retried_"))

    def wait_ready(self) -> None:
        """Every worker that the router knows takes requests."""

        def are_ready() -> bool:
            return self.is_ready() and all(worker["state"] == "ready" for worker in self.workers().values())

        wait_until(are_ready, "readiness", self.processes["router"])


def _for_prefill(word: str) -> str:
    """A word of decode's lines, on prefill's machines."""
    return word.replace(ROLES["decode"], ROLES["prefill"]).replace(SECOND["decode"], SECOND["prefill"])


def _with_groups(word: str) -> str:
    """The router's list with as many members of prefill as of decode; other words as they are."""
    members = [entry for entry in word.split(",") if entry.startswith("decode@")]
    return ",".join([_for_prefill(entry).replace("decode@", "prefill@") for entry in members] + members) or word


@pytest.fixture(scope="module", params=["TP 4", pytest.param("DEP 4", marks=pytest.mark.wide)])
def compared(tiny_models: Path, request: pytest.FixtureRequest) -> Iterator[Compared]:
    model, prefill = tiny_models / "qwen3_moe", request.param
    with made_cluster(lambda network, folder: Compared(network, model, folder, prefill)) as cluster:
        for name in cluster.names(""):
            cluster.start(name)
        cluster.wait_ready()
        yield cluster


def test_answers_are_those_of_transformers(compared: Compared) -> None:
    """All at once, and once more, when caches have them."""
    prompts = [random_prompt(40 + 7 * seed, seed) for seed in range(NUM_PROMPTS)]
    cold, again = (ask_at_once(compared, prompts, 6) for _ in range(2))
    assert all(answer.timings["transferred_bytes"] > 0 for answer in cold)
    assert not any(answer.timings["decode_cached_tokens"] for answer in cold)
    hits = [answer.timings["decode_cached_tokens"] for answer in again]
    whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]
    assert any(map(operator.ge, hits, whole)), hits  # all but what went elsewhere, as a member was too busy to report
    compared.wait_quiet()


def test_the_router_knows_who_computes_together(compared: Compared) -> None:
    """A worker of several ranks is one worker, each member of a group is one."""
    told = Counter((worker["role"], worker["group"]) for worker in compared.workers().values())
    of_prefill = ("prefill", None) if compared.is_worker_of_ranks else ("prefill", f"{ROLES['prefill']}:5000")
    num_prefill = 1 if compared.is_worker_of_ranks else SIZE
    assert told == {of_prefill: num_prefill, ("decode", f"{ROLES['decode']}:5000"): SIZE}


def test_what_listens_where(compared: Compared) -> None:
    for machine in compared.machines.values():
        others = {"127.0.0.1"} if machine.address == ROLES["router"] else set()
        assert machine.listening() == {machine.address, *others}


TP_4 = pytest.mark.parametrize("compared", ["TP 4"], indirect=True)


@TP_4
def test_a_rank_of_prefill_killed_in_the_middle_of_traffic(compared: Compared) -> None:
    """On the second machine. Its worker ends whole, node 0 is started by hand, and no request has a wrong answer."""
    node, before = compared.processes["prefill-1"], compared.num_retried()

    def ask(user: int, number: int) -> None:
        prompt = random_prompt(60, seed=1000 * (user + 1) + number)
        assert_true(compared.model_path, prompt, complete_when_there(compared, prompt))

    def is_computing() -> bool:
        return any(worker["rooms"] for worker in compared.workers().values() if worker["role"] == "prefill")

    with asking(NUM_USERS, ask, compared.processes["router"]) as go_on:
        go_on(1)
        ranks = psutil.Process(node.popen.pid).children(recursive=True)
        assert len(ranks) == SIZE // 2
        ranks[-1].suspend()  # the others wait for it, so a prompt that is there stays
        wait_until(is_computing, "a prompt", node)
        ranks[-1].kill()
        assert compared.processes["prefill-0"].popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        compared.start("prefill-0")
        go_on(2)
    assert node.popen.poll() is None, "it joined the new one"
    assert compared.num_retried() > before
    compared.wait_quiet()


@TP_4
def test_a_member_of_decode_killed_in_the_middle_of_streams(compared: Compared) -> None:
    """Its group ends with it, all are started by hand, and each stream goes on."""
    prompts = [random_prompt(40 + 7 * seed, seed=100 + seed) for seed in range(NUM_USERS)]
    before = compared.num_retried()
    all_have_begun = Barrier(NUM_USERS + 1)  # a stream that has begun is waited for however long

    def stream(prompt: list[int]) -> list[int]:
        todo = [all_have_begun]

        def on_token(count: int) -> None:
            if count >= 10 and todo:
                todo.pop().wait(PATIENCE_S)

        return stream_tokens(compared, prompt, STREAM_LEN, on_token)

    *others, last = compared.names("decode")
    with ThreadPoolExecutor(NUM_USERS) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        all_have_begun.wait(PATIENCE_S)
        compared.processes[last].kill()
        for name in others:
            assert compared.processes[name].popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
        wait_until(lambda: not compared.is_ready(), "the end to be noticed")
        for name in (*others, last):
            compared.start(name)  # by this thread: what a thread starts there ends with it
        streamed = [asked.result() for asked in streams]
    compared.wait_ready()
    assert streamed == [answer.tokens for answer in ask_at_once(compared, prompts, STREAM_LEN)]
    assert compared.num_retried() > before
    compared.wait_quiet()


def ask_at_once(cluster: Compared, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    """Every answer is judged."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: cluster.complete(prompt, max_tokens), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_true(cluster.model_path, prompt, answer)
    return answers


def complete_when_there(cluster: Compared, prompt: list[int]) -> Answer:
    """Asked again after a 503: a worker may take longer to start than requests wait for it."""
    while True:
        try:
            return cluster.complete(prompt, 6)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            cluster.wait_ready()
