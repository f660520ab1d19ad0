"""Answers through prefill and decode over NIXL, against transformers: every family, page size, chunk cut and hit.

One server per row of the table, many cases each. `make test` runs a sparse selection with the cache, in which every
page size occurs. CI adds rows without it and of further families, which tests/product/test_any_ranks.py and, beside
this file, test_shapes, test_pressure, test_tensor_parallel and test_windows show, too. `make test-full` runs the cross
product.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_true, moved_bytes, random_prompt
from tests.e2e.server import Answer, Api, serving
from tests.fixtures.tiny_models import VARIANTS

FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == torch.float32]
PAGE_SIZES = (1, 16, 64)
QUICK = {
    ("llama", 1, True),
    ("llama", 16, True),
    ("qwen3", 64, True),
    ("qwen3_yarn_rope", 1, True),
    ("minimax_m2", 16, True),
}
WIDE = {
    ("llama", 64, False),
    ("qwen3_moe", 16, False),
    ("deepseek_v3", 16, True),
    ("gemma3_text", 16, True),
    ("gpt_oss", 1, True),
}


def _row(name: str, page_size: int, cache: bool) -> object:
    row = name, page_size, cache
    marks = () if row in QUICK else pytest.mark.wide if row in WIDE else pytest.mark.slow
    return pytest.param(*row, marks=marks, id=f"{name}-page{page_size}-{'cache' if cache else 'off'}")


@pytest.mark.parametrize(
    ("name", "page_size", "cache"), [_row(*row) for row in product(FLOAT32, PAGE_SIZES, (True, False))]
)
def test_answers_are_those_of_transformers(
    tiny_models: Path, folder: Path, name: str, page_size: int, cache: bool
) -> None:
    """Chunks of one page (of 8 where a page is one token): every prompt beyond that is cut."""
    chunk = max(page_size, 8)
    flags = ["--page-size", str(page_size), "--chunked-prefill-size", str(chunk), "--num-pages", str(2048 // page_size)]
    flags += ["--attention-split-tokens", str(max(page_size, 32)), "--context-length", "256"]
    flags += [] if cache else ["--disable-radix-cache"]
    model = tiny_models / name
    with serving(folder, model, *flags) as server:
        check_lengths(server, model, page_size, chunk)
        check_hits(server, model, page_size, cache)
        check_batch(server, model, page_size)


def check_lengths(server: Api, model: Path, page_size: int, chunk: int) -> None:
    """Cold prompts around every border, prompt logprobs too."""
    lengths = {1, 2, page_size - 1, page_size, page_size + 1, 2 * chunk, 2 * chunk + 1, 3 * chunk - 1} - {0}
    for length in sorted(lengths):
        prompt = random_prompt(length, seed=length)
        assert_true(model, prompt, server.complete(prompt, 3, prompt_logprobs=0))


def check_hits(server: Api, model: Path, page_size: int, cache: bool) -> None:
    """No, some, all but one and all tokens cached on decode; then the answer itself as a prefix: the second turn."""
    unit = max(page_size, 16)
    whole = random_prompt(3 * unit, seed=1000)
    cold = server.complete(whole, 6)
    assert_true(model, whole, cold)
    assert cold.cached_len == 0

    def expect(prompt: list[int], hit: int) -> Answer:
        answer = server.complete(prompt, 6)
        assert_true(model, prompt, answer)
        wanted = hit if cache else 0
        assert answer.timings["decode_cached_tokens"] == wanted
        payload = answer.timings["transferred_bytes"] - moved_bytes(model, page_size, len(prompt), wanted)
        assert 0 < payload < MAX_PAYLOAD_BYTES
        return answer

    expect(random_prompt(2 * unit + 1, seed=1001), 0)
    expect(whole[: 2 * unit] + random_prompt(unit + 3, seed=1002), 2 * unit)
    expect([*whole, 7], 3 * unit)
    expect(whole, 3 * unit)
    turn = [*whole, *cold.tokens, *random_prompt(5, seed=1003)]
    expect(turn, (len(whole) + 5) // page_size * page_size)  # decode has no KV of the last token it made
    # Prompt logprobs of cached tokens: prefill computes them all again, decode still asks for the rest only.
    asked = server.complete(whole, 2, prompt_logprobs=0)
    assert_true(model, whole, asked)
    assert len(asked.prompt_logprobs) == len(whole) - 1


def check_batch(server: Api, model: Path, page_size: int) -> None:
    """Requests at once, with shared and private prefixes."""
    shared = random_prompt(2 * max(page_size, 16), seed=2000)
    prompts = [shared + random_prompt(3 + i, seed=2001 + i) for i in range(4)]
    prompts += [random_prompt(10 + 7 * i, seed=2100 + i) for i in range(3)] + [prompts[0]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 12), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_true(model, prompt, answer)
    assert answers[0].tokens == answers[-1].tokens
