"""Little memory: retraction, eviction, aborted requests. Answers stay those of transformers, nothing stays held."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import PLAIN_HTTP, Answer, Server, serving
from tests.patience import PATIENCE_S

PAGE = 16
FLAGS = ("--page-size", str(PAGE), "--chunked-prefill-size", str(PAGE), "--attention-split-tokens", str(PAGE))


def at_once(server: Server, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.complete(prompt, max_tokens), prompts))


@pytest.mark.parametrize(
    ("extend", "cache"),
    [
        pytest.param(0, True, id="refetched"),
        pytest.param(256, False, id="extended-off"),
        pytest.param(256, True, id="extended", marks=pytest.mark.slow),
        pytest.param(0, False, id="refetched-off", marks=pytest.mark.slow),
    ],
)
def test_retracted_requests_go_on_as_if_nothing_had_happened(
    tiny_models: Path, folder: Path, extend: int, cache: bool
) -> None:
    """8 requests that grow to 28 pages each in a pool of 40. Resumed through prefill, or extended on decode."""
    model = tiny_models / "llama"
    flags = [*FLAGS, "--num-pages", "40", "--num-reserved-decode-tokens", "0", "--decode-extend-tokens", str(extend)]
    flags += ["--log-dir", "logs"] if cache else ["--log-dir", "logs", "--disable-radix-cache"]
    with serving(folder, model, *flags) as server:
        prompts = [random_prompt(40 + i, seed=i) for i in range(8)]
        answers = at_once(server, prompts, 400)
        assert sum(answer.timings["num_retractions"] for answer in answers) > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(model, prompt, answer)
        for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
            turn = [*prompt, *answer.tokens, 1, 2, 3]
            assert_true(model, turn, server.complete(turn, 4))
        check_told(server, cache)


def check_told(server: Server, cache: bool) -> None:
    """The operator sees what the shortage has cost, in metrics and in the log."""
    for _ in range(2):
        server.complete(random_prompt(40, seed=99), 2)
    server.wait_quiet()
    samples = server.http.get("/metrics").text

    def value(name: str, labels: str = 'instance="decode-0"') -> float:
        found = re.search(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", samples, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    for name in ("deltaserve_retractions_total", "deltaserve_admissions_blocked_total"):
        assert value(name) > 0
    assert (value("deltaserve_pages_evicted_total") > 0) == cache
    assert (value("deltaserve_cached_tokens_total", 'side="decode"') > 0) == cache
    for name in ("pages_usage", "num_running_reqs", "num_queue_reqs", "blocked_need_pages"):
        assert value(f"deltaserve_{name}") == 0
    (log,) = server.folder.glob("logs/decode-0.log")
    assert re.search(r"\d+ running, \d+ waiting.*; pool 0: \d+% used", log.read_text())


def test_eviction_pressure(tiny_models: Path, folder: Path) -> None:
    """Six times the pool in prefixes, in random order, some at once; and requests as large as the whole pool."""
    model = tiny_models / "qwen3_moe"
    with serving(folder, model, *FLAGS, "--num-pages", "24", "--num-reserved-decode-tokens", "0") as server:
        prefixes = [random_prompt(5 * PAGE, seed=i) for i in range(30)]
        order = random.Random(0)
        hits = 0
        for turn in range(12):
            prompts = [order.choice(prefixes) + random_prompt(1 + turn, seed=100 + turn) for _ in range(4)]
            answers = at_once(server, prompts, 6)
            hits += sum(answer.timings["decode_cached_tokens"] > 0 for answer in answers)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_true(model, prompt, answer)
        assert hits > 0
        large = random_prompt(24 * PAGE - 8, seed=999)
        assert_true(model, large, server.complete(large, 8, prompt_logprobs=0))
        with pytest.raises(httpx.HTTPStatusError) as refused:
            server.complete([*large, 1], 8)
        assert refused.value.response.status_code == 400
        assert refused.value.response.json()["error"]["code"] == "context_length_exceeded"


def test_clients_that_leave(tiny_models: Path, shared_pair: Server) -> None:
    """At any moment: in the queue, during prefill, during the transfer, in the middle of the output."""
    before = num_cancelled(shared_pair)
    prompts = [random_prompt(30 * PAGE + i, seed=i) for i in range(6)]
    leaving = random.Random(1)
    for _ in range(3):
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(
                pool.map(
                    lambda prompt, seconds: leave_after(shared_pair, prompt, seconds),
                    prompts,
                    [leaving.uniform(0.0, 0.4) for _ in prompts],
                )
            )
    workers = shared_pair.wait_quiet()
    assert workers["decode-0"]["status"]["leases"] == 0
    assert num_cancelled(shared_pair) > before
    for prompt in prompts:
        assert_true(tiny_models / "llama", prompt, shared_pair.complete(prompt, 4))


def num_cancelled(server: Server) -> int:
    """Requests whose clients left, since the start."""
    return int(server.info()["engine"]["counts"].get("failed_cancelled", 0))


def leave_after(server: Server, prompt: list[int], seconds: float) -> None:
    """Hang up when nothing was read for that long, or after two events."""
    timeout = httpx.Timeout(PATIENCE_S, read=seconds)
    body = server.body(prompt, max_tokens=400, stream=True)
    try:
        with httpx.stream(
            "POST", f"{server.base_url}/v1/completions", json=body, timeout=timeout, verify=PLAIN_HTTP
        ) as reply:
            for number, _ in enumerate(reply.iter_lines()):
                if number > 2:
                    return
    except httpx.ReadTimeout:
        return
