"""Workers of several rank processes, over every way to move their pages: answers are those of transformers.

Pages go from each rank to those that hold its heads on the other side, over NIXL and Mooncake. `make test` runs four
launches, `make test-full` as many as let every two values of two factors meet. The full product of them runs in one
process (tests/product); tests/e2e/test_rank_deaths.py kills ranks.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compute.executor.world import TOLERANCE
from tests.e2e.covering import Row, allowed_rows, covering_rows, pairs_of
from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_true, moved_bytes, random_prompt
from tests.e2e.server import Server, serving
from tests.fixtures.mooncake_engines import need_mooncake

FAMILIES = ("llama", "qwen3", "qwen3_moe", "minimax_m2", "deepseek_v3")
RANKS = (1, 2, 4)
OVER_NIXL = ("--disaggregation-transfer-backend", "nixl")
OVER_MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")
PATHS = {
    "direct": (*OVER_NIXL, "--staging", "off"),
    "staged": (*OVER_NIXL, "--staging", "on"),
    "auto": (*OVER_NIXL, "--staging", "auto"),
    "mooncake": (*OVER_MOONCAKE, "--staging", "off"),
    "mooncake-staged": (*OVER_MOONCAKE, "--staging", "on"),
}
"""Paths of the pages from prefill to decode, with their flags."""
STAGED = ("staged", "mooncake-staged")
PAGES = ((16, 16), (1, 1), (16, 64), (64, 16))
"""Tokens in a page of prefill and of decode."""
TOLERANCES = {"float32": TOLERANCE, "bfloat16": 0.02, "fp8_e4m3": 0.3}
"""What decode keeps of the float32 of prefill |-> how far log-probabilities may be from those of float32. Measured with
these prompts, whatever the pages: 0.013 and 0.22."""
REPLICATED = ("deepseek_v3",)
"""Every rank holds the latent of all heads: one writer sends it as it is."""


class Launch(NamedTuple):
    """One `serve`: a value for each factor."""

    family: str
    prefill_ranks: int
    decode_ranks: int
    decode_cache: bool
    path: str
    pages: tuple[int, int]
    kv_dtype: str = "float32"

    @property
    def unit(self) -> int:
        """Lengths of prompts are counted in these: a multiple of every page size."""
        return max(16, *self.pages)

    @property
    def flags(self) -> list[str]:
        prefill_page, decode_page = self.pages
        flags = ["--prefill-page-size", str(prefill_page), "--decode-page-size", str(decode_page)]
        flags += ["--num-pages", str(2048 // min(self.pages)), "--context-length", "512"]
        flags += ["--chunked-prefill-size", str(self.unit), "--attention-split-tokens", str(2 * self.unit)]
        flags += ["--prefill-tp-size", str(self.prefill_ranks), "--decode-tp-size", str(self.decode_ranks)]
        flags += PATHS[self.path]
        flags += [] if self.kv_dtype == "float32" else ["--decode-kv-cache-dtype", self.kv_dtype]
        return flags if self.decode_cache else [*flags, "--disable-decode-radix-cache"]

    @property
    def name(self) -> str:
        cache = "cache" if self.decode_cache else "off"
        pages = "-".join(str(size) for size in dict.fromkeys(self.pages))
        name = f"{self.family}-P{self.prefill_ranks}-D{self.decode_ranks}-page{pages}-{cache}-{self.path}"
        return name if self.kv_dtype == "float32" else f"{name}-{self.kv_dtype}"

    @property
    def copies(self) -> int:
        """Copies of what moves, one for each reader of it."""
        return self.decode_ranks if self.family in REPLICATED else 1

    @property
    def must_stage(self) -> bool:
        """`auto` may, between unequal ranks, too."""
        if self.path not in (*STAGED, "auto"):
            return False
        is_recut = len(set(self.pages)) > 1 or self.kv_dtype != "float32"
        has_ranges = self.prefill_ranks != self.decode_ranks and self.family not in REPLICATED
        return is_recut or (self.path in STAGED and has_ranges)


FACTORS = (FAMILIES, RANKS, RANKS, (True, False), tuple(PATHS), PAGES, tuple(TOLERANCES))
"""Values of a Launch's fields, in its order. Hits are no factor: prompts of which nothing, a part and all is cached go
to each."""
QUICK = (
    Launch("deepseek_v3", 2, 1, True, "direct", (16, 16)),
    Launch("minimax_m2", 1, 2, True, "staged", (16, 16)),
    Launch("qwen3_moe", 2, 2, False, "auto", (64, 16)),
    Launch("minimax_m2", 2, 1, True, "mooncake", (16, 16)),
)


def is_allowed(row: Row) -> bool:
    """Whether a launch is allowed. Elements of other dtypes are converted in staging memory alone, without it the
    handshake refuses (control/peer/page_fit.py). And only of llama is it known what rounding does to answers: other
    tiny models choose other experts, or are taken as far away by fp8 on both sides, which is converted nowhere."""
    launch = Launch(*row)  # type: ignore[arg-type]
    return launch.kv_dtype == "float32" or (launch.path in (*STAGED, "auto") and launch.family == "llama")


LAUNCHES = [
    Launch(*row)  # type: ignore[arg-type]
    for row in covering_rows(allowed_rows(FACTORS, is_allowed), begin_with=QUICK)
]


def test_every_two_values_that_may_meet_do() -> None:
    met = set().union(*(pairs_of(launch) for launch in LAUNCHES))
    assert all(is_allowed(launch) for launch in LAUNCHES)
    assert met == {pair for row in product(*FACTORS) if is_allowed(row) for pair in pairs_of(row)}
    assert tuple(LAUNCHES[: len(QUICK)]) == QUICK
    assert len(set(LAUNCHES)) == len(LAUNCHES) < 2 * len(FAMILIES) * len(PATHS)


@pytest.mark.parametrize(
    "launch",
    [pytest.param(launch, id=launch.name, marks=() if launch in QUICK else pytest.mark.slow) for launch in LAUNCHES],
)
def test_answers_are_those_of_transformers(tiny_models: Path, folder: Path, launch: Launch) -> None:
    if launch.path.startswith("mooncake"):
        need_mooncake()
    model = tiny_models / launch.family
    with serving(folder, model, *launch.flags) as server:
        check_answers(server, model, launch)
        server.wait_quiet()
        staged = server.metrics()["prefill-0"].get("deltaserve_staged_writes_total", 0)
        if launch.path != "auto" or launch.must_stage:
            assert (staged > 0) is launch.must_stage


def check_answers(server: Server, model: Path, launch: Launch) -> None:
    """Cold, cut into chunks, with prompt log-probabilities; no, a part and all of it cached; several at once."""
    unit, tolerance, page_size = launch.unit, TOLERANCES[launch.kv_dtype], launch.pages[1]
    whole = random_prompt(3 * unit, seed=1)

    def expect(prompt: list[int], hit: int, **fields: object) -> None:
        answer = server.complete(prompt, 6, **fields)
        assert_true(model, prompt, answer, tolerance)
        wanted = hit if launch.decode_cache else 0
        assert answer.timings["decode_cached_tokens"] == wanted
        if launch.kv_dtype == "float32":
            moved = launch.copies * moved_bytes(model, page_size, len(prompt), wanted)
            assert 0 < answer.timings["transferred_bytes"] - moved < MAX_PAYLOAD_BYTES

    expect(whole, 0, prompt_logprobs=0)
    expect(whole[: 2 * unit] + random_prompt(unit + 3, seed=2), 2 * unit)
    expect(whole, 3 * unit)
    prompts = [whole[:unit] + random_prompt(5 + 7 * i, seed=3 + i) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 8), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_true(model, prompt, answer, tolerance)
