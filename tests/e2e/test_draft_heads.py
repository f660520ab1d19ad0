"""Draft heads on real servers: answers are those without guesses, over ranks, and with a prefill that has no head."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Api, Process, Server, serving, wait_until
from tests.e2e.test_pressure import at_once
from tests.fixtures.mooncake_engines import need_mooncake
from tests.fixtures.tiny_models import EAGLE3_HEAD, EAGLE3_MODEL
from tests.ports import free_ports

FLAGS = (
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "64",
    "--attention-split-tokens",
    "32",
    "--context-length",
    "512",
)
ALWAYS = ("--speculative-policy", "always")
"""Heads of tiny models take about as long as their models, and would not be asked."""
NEXTN = ("--speculative-algorithm", "NEXTN", *ALWAYS)


def check_answers(server: Server, model: Path) -> None:
    """Cold, from the caches, the next turn, and several at once; some guesses are right."""
    whole = random_prompt(150, seed=1)
    cold = server.complete(whole, 24)
    assert_true(model, whole, cold)
    assert cold.timings["decode_cached_tokens"] == 0
    again = server.complete(whole, 24)
    assert_true(model, whole, again)
    assert again.timings["decode_cached_tokens"] == 144
    turn = [*whole, *cold.tokens, 1, 2, 3]
    assert_true(model, turn, server.complete(turn, 24))
    prompts = [[*whole[:64], *random_prompt(9 + seed, seed=seed)] for seed in range(5)]
    for prompt, answer in zip(prompts, at_once(server, prompts, 24), strict=True):
        assert_true(model, prompt, answer)
    server.wait_quiet()
    assert sum(of_worker["deltaserve_drafts_accepted_total"] for of_worker in server.metrics().values()) > 20


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param("deepseek_v3_mtp", NEXTN, id="deepseek_v3"),
        pytest.param("qwen3_5_moe_mtp", (*NEXTN, "--tp-size", "2"), id="qwen3_5_moe-TP2"),
        pytest.param("qwen3_next_mtp", NEXTN, id="qwen3_next", marks=pytest.mark.slow),
        pytest.param("qwen3_5_mtp", NEXTN, id="qwen3_5", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_guesses(tiny_models: Path, folder: Path, name: str, flags: tuple[str, ...]) -> None:
    with serving(folder, tiny_models / name, *FLAGS, *flags) as server:
        check_answers(server, tiny_models / name)


def test_an_eagle3_head(tiny_models: Path, folder: Path) -> None:
    model, head = tiny_models / EAGLE3_MODEL, tiny_models / EAGLE3_HEAD
    flags = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head), *ALWAYS)
    with serving(folder, model, *FLAGS, *flags) as server:
        check_answers(server, model)


@contextmanager
def apart(folder: Path, model: Path, *flags: str) -> Iterator[tuple[Api, Process]]:
    """Prefill without guesses, decode with the model's head, and a router: three commands; the API and decode."""
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_urlsafe(48))
    ports = free_ports(3)
    with ExitStack() as stack:

        def start(command: str, *argv: str) -> Process:
            process = Process(folder / command, command, str(model), "--cluster-key-file", str(key), *argv)
            stack.callback(process.kill)
            return process

        start("prefill", "--disaggregation-bootstrap-port", str(ports[0]), *flags)
        decode = start("decode", "--disaggregation-bootstrap-port", str(ports[1]), *flags, *NEXTN)
        workers = f"prefill@127.0.0.1:{ports[0]},decode@127.0.0.1:{ports[1]}"
        router = start("router", "--port", str(ports[2]), "--workers", workers, *flags[:2])
        api = Api(f"http://127.0.0.1:{ports[2]}", model.name)
        stack.callback(api.http.close)
        wait_until(api.is_ready, "readiness", router)
        yield api, decode


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        pytest.param("nixl", 2, id="nixl-TP2", marks=pytest.mark.wide),
        pytest.param("mooncake", 2, id="mooncake-TP2"),
        pytest.param("mooncake", 4, id="mooncake-TP4", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_worker_without_a_head(tiny_models: Path, folder: Path, backend: str, num_ranks: int) -> None:
    """The public recipe of a hybrid with decode's cache: pages of 64 tokens, ranks, guesses on decode alone."""
    if backend == "mooncake":
        need_mooncake()
    model = tiny_models / "qwen3_5_moe_mtp"
    pages = ("--page-size", "64", "--chunked-prefill-size", "64", "--attention-split-tokens", "64")
    ranks = ("--tp-size", str(num_ranks), "--disaggregation-transfer-backend", backend)
    flags = (*pages, "--context-length", "512", *ranks)
    with apart(folder, model, *flags) as (api, decode):
        prompt = random_prompt(150, seed=1)
        for cached_len in (0, 128):
            answer = api.complete(prompt, 24)
            assert_true(model, prompt, answer)
            assert answer.timings["decode_cached_tokens"] == cached_len
            assert answer.timings["accepted_tokens"] > 0
        assert "prefill has sent no keys and values of the draft head" in decode.log()
