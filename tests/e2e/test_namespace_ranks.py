"""Workers of unequal ranks on machines of their own, which are network namespaces: staged, and over Mooncake.

Page transfers go between machines, and what the ranks of one worker say to each other stays on its own.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.e2e.test_namespaces import PAGE, ROLES, STREAM_LEN, Cluster, doctor, running_cluster
from tests.e2e.test_parity import check_batch, check_hits
from tests.fixtures.mooncake_engines import need_mooncake
from tests.patience import PATIENCE_S

LAUNCHES = {
    "staged": (2, 1, ("--staging", "on")),
    "direct": (1, 2, ("--staging", "off")),
    "mooncake": (2, 1, ("--disaggregation-transfer-backend", "mooncake")),
}


@pytest.fixture(
    scope="module",
    params=["staged", pytest.param("direct", marks=pytest.mark.slow), "mooncake"],
)
def ranked(tiny_models: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "mooncake":
        need_mooncake()
    prefill, decode, flags = LAUNCHES[request.param]
    extra = {"prefill": ("--tp-size", str(prefill), *flags), "decode": ("--tp-size", str(decode), *flags)}
    with running_cluster(tiny_models / "llama", extra) as cluster:
        yield cluster


def test_answers_are_those_of_transformers(ranked: Cluster) -> None:
    check_hits(ranked, ranked.model_path, PAGE, True)
    check_batch(ranked, ranked.model_path, PAGE)
    ranked.wait_quiet()


def test_what_listens_where(ranked: Cluster) -> None:
    """On the address that was named alone, but for what Mooncake's library opens: a filter drops what comes there for
    another address (tests/transports/test_mooncake_rows.py)."""
    argv = ranked.argv("prefill")
    librarys = {"0.0.0.0", "*"} if "mooncake" in argv else set()
    for role in ("prefill", "decode"):
        assert ranked.machines[role].listening() == {ROLES[role], *librarys}


def test_doctor_finds_nothing_wrong(ranked: Cluster) -> None:
    ended = doctor(ranked, "prefill")
    assert ended.code == 0, ended.text


def test_a_rank_killed_in_the_middle_of_a_stream(ranked: Cluster) -> None:
    """Its worker ends; the one that is started by hand goes on where the stream was."""
    role = next(role for role in ("prefill", "decode") if ranks_of(ranked, role))
    prompt = random_prompt(3 * PAGE + 1, seed=4)
    undisturbed = stream_tokens(ranked, prompt, STREAM_LEN, lambda count: None)
    todo = ranks_of(ranked, role)[:1]

    def on_token(count: int) -> None:
        if count >= 10 and todo:
            todo.pop().kill()
            assert ranked.processes[role].popen.wait(PATIENCE_S) == Exit.RANK_ENDED.value
            ranked.start(role)

    assert stream_tokens(ranked, prompt, STREAM_LEN, on_token) == undisturbed
    wait_until(ranked.is_ready, "readiness", ranked.processes[role])
    assert_true(ranked.model_path, prompt, ranked.complete(prompt, 4))
    ranked.wait_quiet()


def ranks_of(cluster: Cluster, role: str) -> list[psutil.Process]:
    """Ranks 1 and following."""
    children = psutil.Process(cluster.processes[role].popen.pid).children(recursive=True)
    return [child for child in children if "deltaserve.process.worker.rank" in child.cmdline()]
