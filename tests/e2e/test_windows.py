"""Models with sliding windows as processes over NIXL: what is kept and moved of a window, under pressure too."""

from pathlib import Path

import pytest

from deltaserve.cli.main import main
from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_true, moved_bytes, page_bytes, random_prompt
from tests.e2e.server import serving
from tests.e2e.test_pressure import at_once

PAGE = 16
FLAGS = (
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "16",
    "--attention-split-tokens",
    "32",
    "--context-length",
    "640",
)


def families(quick: str) -> list[object]:
    """The other one takes as long again."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.slow) for name in ("gemma3_text", "gpt_oss")]


@pytest.mark.parametrize("name", families("gemma3_text"))
def test_only_what_a_window_still_shows_is_moved_and_kept(tiny_models: Path, folder: Path, name: str) -> None:
    """A prompt of 13 windows, and its repetitions: cut before, at and after the window's edge, and continued.

    The pool of the window holds 24 pages per worker, the request 30.
    """
    model = tiny_models / name
    with serving(folder, model, *FLAGS, "--num-pages", "80", "--max-running-requests", "1") as server:
        assert "80 pages (" in server.log()
        assert "24 of the last 24 tokens (" in server.log()
        whole = random_prompt(20 * PAGE, seed=1)
        cold = server.complete(whole, 150)
        assert_true(model, whole, cold)
        _check_bytes(cold.timings["transferred_bytes"], model, len(whole), 0, 0)
        assert moved_bytes(model, PAGE, len(whole), 0) < 20 * page_bytes(model, PAGE) * 0.6
        # What the window showed at the end of the prompt is in decode's tree, what it showed before never came there.
        kept = (20 * PAGE - 1, 20 * PAGE + 1)
        for length in (*kept, 19 * PAGE, 18 * PAGE + 7, 10 * PAGE):
            prompt = [*whole, *cold.tokens][:length]
            answer = server.complete(prompt, 3)
            assert_true(model, prompt, answer)
            hit = length // PAGE * PAGE
            assert answer.timings["decode_cached_tokens"] == hit
            _check_bytes(answer.timings["transferred_bytes"], model, length, hit, hit if length in kept else 0)
        turn = [*whole, *cold.tokens, 1, 2, 3]
        answer = server.complete(turn, 5, prompt_logprobs=0)
        assert_true(model, turn, answer)


def _check_bytes(transferred: int, model: Path, length: int, hit: int, window_hit: int) -> None:
    assert 0 < transferred - moved_bytes(model, PAGE, length, hit, window_hit) < MAX_PAYLOAD_BYTES


@pytest.mark.parametrize("name", families("gpt_oss"))
def test_retraction_and_eviction(tiny_models: Path, folder: Path, name: str) -> None:
    """8 requests that grow to 28 pages each in a pool of 40; then prefixes of several times that, and their turns."""
    model = tiny_models / name
    flags = [*FLAGS, "--num-pages", "40", "--num-reserved-decode-tokens", "0", "--radix-eviction-policy", "slru"]
    with serving(folder, model, *flags) as server:
        prompts = [random_prompt(40 + i, seed=i) for i in range(8)]
        answers = at_once(server, prompts, 400)
        assert sum(answer.timings["num_retractions"] for answer in answers) > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_true(model, prompt, answer)
        for seed in (20, 21, 22, 23, 20, 24, 25, 21):
            prompt = random_prompt(15 * PAGE, seed=seed)
            assert_true(model, prompt, server.complete(prompt, 4))


@pytest.mark.parametrize("name", families("gpt_oss"))
def test_one_process_alone_and_verify(
    tiny_models: Path, folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models / name
    with serving(folder, model, *FLAGS, "--num-pages", "160", "--disaggregation-mode", "null") as server:
        whole = random_prompt(100, seed=1)
        answers = [server.complete(prompt, 40) for prompt in (whole, whole, [*whole[:90], 5])]
        for prompt, answer in zip((whole, whole, [*whole[:90], 5]), answers, strict=True):
            assert_true(model, prompt, answer)
        assert answers[2].cached_len == 80
        argv = ["verify", "--base-url", server.base_url, "--model-path", str(model), "--output-len", "8"]
        assert main(argv) == 0
        assert "DIFFERS" not in capsys.readouterr().out
