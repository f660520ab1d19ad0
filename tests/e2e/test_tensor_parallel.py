"""Workers of several rank processes: answers are those of transformers.

Pages move over NIXL from each rank to those that hold its heads on the other side. `make test` runs three launches,
`make test-full` pairs of every two settings. tests/e2e/test_rank_deaths.py kills ranks.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Server, serving

UNIT = 16
"""Lengths of prompts are counted in these: a multiple of every page size."""


class Launch(NamedTuple):
    """One `serve`."""

    family: str
    prefill_ranks: int
    decode_ranks: int
    page_size: int
    decode_cache: bool
    staging: str = "off"

    @property
    def flags(self) -> list[str]:
        size = str(self.page_size)
        flags = ["--page-size", size, "--num-pages", str(2048 // self.page_size), "--context-length", "512"]
        flags += ["--chunked-prefill-size", str(UNIT), "--attention-split-tokens", "32"]
        flags += ["--prefill-tp-size", str(self.prefill_ranks), "--decode-tp-size", str(self.decode_ranks)]
        flags += ["--staging", self.staging]
        return flags if self.decode_cache else [*flags, "--disable-decode-radix-cache"]

    @property
    def name(self) -> str:
        cache = "cache" if self.decode_cache else "off"
        layout = f"{self.family}-P{self.prefill_ranks}-D{self.decode_ranks}-page{self.page_size}-{cache}"
        return layout if self.staging == "off" else f"{layout}-staged-{self.staging}"


FAMILIES = ("llama", "qwen3", "qwen3_moe", "minimax_m2", "deepseek_v3")
VALUES: tuple[tuple[object, ...], ...] = (
    FAMILIES,
    (1, 2, 4),
    (1, 2, 4),
    (1, 16),
    (True, False),
    ("off", "on", "auto"),
)
QUICK = (
    Launch("deepseek_v3", 2, 1, 4, True),
    Launch("minimax_m2", 1, 2, 16, True, "on"),
    Launch("qwen3_moe", 2, 2, 16, False),
)


def covering_launches() -> list[Launch]:
    """Few launches, among which any two values of two settings meet; greedily, in a fixed order."""
    rows = list(product(*VALUES))
    pairs = {(i, a, j, b) for i, j in combinations(range(len(VALUES)), 2) for a in VALUES[i] for b in VALUES[j]}
    chosen: list[tuple[object, ...]] = []
    while pairs:
        best = max(rows, key=lambda row: len(pairs & pairs_of(row)))
        chosen.append(best)
        pairs -= pairs_of(best)
    return [Launch(*row) for row in chosen]  # type: ignore[arg-type]


def pairs_of(row: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def check_answers(server: Server, model: Path, decode_cache: bool) -> None:
    """Cold, cut into chunks, with prompt log-probabilities; no, a part and all of it cached; several at once."""
    whole = random_prompt(3 * UNIT, seed=1)

    def expect(prompt: list[int], hit: int, **fields: object) -> None:
        answer = server.complete(prompt, 6, **fields)
        assert_true(model, prompt, answer)
        assert answer.timings["decode_cached_tokens"] == (hit if decode_cache else 0)

    expect(whole, 0, prompt_logprobs=0)
    expect(whole[: 2 * UNIT] + random_prompt(UNIT + 3, seed=2), 2 * UNIT)
    expect(whole, 3 * UNIT)
    prompts = [whole[:UNIT] + random_prompt(5 + 7 * i, seed=3 + i) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 8), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_true(model, prompt, answer)


@pytest.mark.parametrize(
    "launch",
    [
        *(pytest.param(launch, id=launch.name) for launch in QUICK),
        *(pytest.param(launch, id=launch.name, marks=pytest.mark.slow) for launch in covering_launches()),
    ],
)
def test_answers_are_those_of_transformers(tiny_models: Path, folder: Path, launch: Launch) -> None:
    model = tiny_models / launch.family
    with serving(folder, model, *launch.flags) as server:
        check_answers(server, model, launch.decode_cache)
        if launch.staging == "on" and launch in QUICK:
            (log,) = server.folder.glob("deltaserve-*/prefill-0.log")
            assert "go through staging memory" in log.read_text()
