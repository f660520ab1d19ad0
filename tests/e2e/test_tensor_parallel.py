"""Workers of several rank processes: answers are those of transformers, and they die and come back whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Server, serving

PAGE = 4
FLAGS = (
    "--page-size",
    str(PAGE),
    "--num-pages",
    "512",
    "--chunked-prefill-size",
    str(2 * PAGE),
    "--context-length",
    "256",
)


def ranks_of(server: Server, name: str) -> list[psutil.Process]:
    """Ranks 1 and following of a worker."""
    return psutil.Process(server.pids()[name]).children()


def check_answers(server: Server, model: Path) -> None:
    """Cold, cut into chunks, with prompt log-probabilities, cached, and several at once."""
    whole = random_prompt(7 * PAGE + 1, seed=1)
    assert_true(model, whole, server.complete(whole, 6, prompt_logprobs=0))
    assert_true(model, [*whole, 7], server.complete([*whole, 7], 6))
    assert_true(model, whole, server.complete(whole, 6))
    prompts = [whole[: 4 * PAGE] + random_prompt(3 + i, seed=2 + i) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 8), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_true(model, prompt, answer)


def test_one_worker_of_two_ranks(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--disaggregation-mode", "null", "--tp-size", "2") as server:
        assert "each unified worker: 2 ranks" in server.log()
        assert len(ranks_of(server, "unified-0")) == 1
        check_answers(server, model)
