"""Prefill and decode over the transports that are not the default of one `serve`: answers, wire bytes, leavers, deaths.

Mooncake's are skipped where its library cannot be loaded.
"""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from tests.e2e.questions import RECALL_MODEL, ask_about
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import ROOT, Api, Process, Server, serving, wait_until
from tests.e2e.test_deaths import in_the_middle
from tests.e2e.test_parity import check_batch, check_hits, check_lengths
from tests.e2e.test_pressure import leave_after, num_cancelled
from tests.fixtures.mooncake_engines import need_mooncake
from tests.patience import PATIENCE_S
from tests.ports import free_port

PAGE = 16
FLAGS = ("--page-size", str(PAGE), "--chunked-prefill-size", str(PAGE), "--attention-split-tokens", "32")
POOL = ("--num-pages", "1024", "--context-length", "4096")


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def pair(tiny_models: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "mooncake":
        need_mooncake()
    flags = ("--disaggregation-transfer-backend", request.param, *FLAGS, *POOL)
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder,
        serving(Path(folder), tiny_models / "llama", *flags, deaths=None) as server,
    ):
        yield server


def test_answers_and_wire_bytes_are_those_of_any_transport(tiny_models: Path, pair: Server) -> None:
    """The checks of test_parity: equal to transformers, and what was moved is the delta."""
    model = tiny_models / "llama"
    check_lengths(pair, model, PAGE, PAGE)
    check_hits(pair, model, PAGE, True)
    check_batch(pair, model, PAGE)


def test_clients_that_leave_cost_others_an_attempt_at_most(tiny_models: Path, pair: Server) -> None:
    """Over Mooncake, one after a write was posted has the writer fenced, and with it what others have under way."""
    model, before = tiny_models / "llama", num_cancelled(pair)
    leaving = random.Random(1)
    prompts = [random_prompt(30 * PAGE + i, seed=100 + i) for i in range(6)]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        for _ in range(3):
            gone = [pool.submit(leave_after, pair, prompt, leaving.uniform(0.0, 0.4)) for prompt in prompts]
            stayed = [random_prompt(20 * PAGE + i, seed=leaving.randrange(1 << 30)) for i in range(3)]
            for prompt, answer in zip(stayed, pool.map(lambda prompt: pair.complete(prompt, 4), stayed), strict=True):
                assert_true(model, prompt, answer)
            for left in gone:
                left.result()
    pair.wait_quiet()
    assert num_cancelled(pair) > before


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_killed_in_the_middle_of_a_transfer(
    tiny_models: Path, pair: Server, name: str, request: pytest.FixtureRequest
) -> None:
    """Its engines end with it; the request is answered by the next one."""
    engines = psutil.Process(pair.pid(name)).children(recursive=True)
    assert engines or request.node.callspec.params["pair"] == "nixl"
    with ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(pair, pool, 1)
        pair.signal(name, signal.SIGKILL)
        if name == "prefill-0":
            asked.assert_right(tiny_models / "llama")
    pair.wait_back(name)
    wait_until(lambda: not any(engine.is_running() for engine in engines), "its engines to end", pair)
    prompt = random_prompt(20 * PAGE, seed=77)
    assert_true(tiny_models / "llama", prompt, pair.complete(prompt, 4))


def test_two_ranks_of_one_machine_write_to_one_by_way_of_staging_memory() -> None:
    flags = ("--page-size", str(PAGE), "--prefill-tp-size", "2", "--staging", "on", "--num-pages", "512")
    asked = ask_about(3, 2, 16, seed=1)
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder,
        serving(Path(folder), RECALL_MODEL, *flags) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = pool.map(lambda one: server.complete(one.prompt, len(one.answer)).tokens, asked)
        assert list(answers) == [one.answer for one in asked]
        (log,) = server.folder.glob("deltaserve-*/prefill-0.log")
        assert "go through staging memory" in log.read_text()


def serve_without_nixl(folder: Path, model: Path, port: int, *flags: str) -> Process:
    """Its library raises when it is imported."""
    library = folder / "nixl_cu12"
    library.mkdir()
    (library / "__init__.py").write_text("raise ModuleNotFoundError('it is not here')\n")
    path = f"PYTHONPATH={folder}:{ROOT / 'src'}:{ROOT}"
    nixl = ("--disaggregation-transfer-backend", "nixl")
    return Process(
        folder / "run", "serve", str(model), "--port", str(port), *nixl, *FLAGS, *POOL, *flags, wrap=("env", path)
    )


def test_a_unified_worker_opens_no_transport(tiny_models: Path, tmp_path: Path) -> None:
    """Neither is its library loaded, nor does anything listen but its links."""
    model, port = tiny_models / "llama", free_port()
    process = serve_without_nixl(tmp_path, model, port, "--disaggregation-mode", "null")
    api = Api(f"http://127.0.0.1:{port}", model.name)
    try:
        wait_until(api.is_ready, "readiness", process)
        prompt = random_prompt(3 * PAGE, seed=5)
        assert_true(model, prompt, api.complete(prompt, 4))
        assert "no pages move (--disaggregation-mode null)" in process.log()
        children = psutil.Process(process.popen.pid).children()
        (worker,) = (child for child in children if "deltaserve.process.worker.worker" in child.cmdline())
        assert len(listeners(worker)) == 1
        assert process.end() == 0
    finally:
        api.http.close()
        process.kill()


def listeners(process: psutil.Process) -> list[Any]:
    return [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]


def test_a_pair_without_its_library_is_one_line(tiny_models: Path, tmp_path: Path) -> None:
    process = serve_without_nixl(tmp_path, tiny_models / "llama", free_port())
    try:
        assert process.popen.wait(PATIENCE_S) == 2
    finally:
        process.kill()
    said = [line for line in process.log().splitlines() if "it is not here" in line]
    assert said
    assert all("nixl-cu12" in line and "host memory" in line and "pip install nixl-cu12" in line for line in said)
    assert "Traceback" not in process.log()
