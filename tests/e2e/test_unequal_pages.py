"""Real processes over NIXL whose pages are of unequal sizes, or dtypes: answers are those of transformers."""

from pathlib import Path

import pytest

from tests.compute.executor.world import TOLERANCE
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import serving

COMMON = ("--context-length", "512", "--num-pages", "512", "--chunked-prefill-size", "64")
LAUNCHES = {
    "direct": (16, 64, ("--staging", "off"), TOLERANCE),
    "staged": (64, 16, ("--staging", "auto", "--prefill-tp-size", "2"), TOLERANCE),
    "fp8": (16, 64, ("--staging", "auto", "--decode-kv-cache-dtype", "fp8_e4m3"), 0.2),
}
"""Pages of prefill and of decode, further flags, and how far log-probabilities may be from those of float32."""


@pytest.mark.parametrize("launch", ["direct", pytest.param("staged", marks=pytest.mark.wide), "fp8"])
def test_answers_are_those_of_transformers(tiny_models: Path, folder: Path, launch: str) -> None:
    model = tiny_models / "llama"
    writer, reader, flags, tolerance = LAUNCHES[launch]
    sizes = ("--prefill-page-size", str(writer), "--decode-page-size", str(reader))
    with serving(folder, model, *COMMON, *sizes, *flags) as server:

        def expect(prompt: list[int], hit: int) -> None:
            answer = server.complete(prompt, 6)
            assert_true(model, prompt, answer, tolerance)
            assert answer.timings["decode_cached_tokens"] == hit // reader * reader

        whole = random_prompt(150, seed=1)
        expect(whole, 0)
        expect(whole, 149)
        expect(whole[:100] + random_prompt(30, seed=2), 100)
        expect(random_prompt(reader + 1, seed=3), 0)
        (log,) = server.folder.glob("deltaserve-*/prefill-0.log")
        assert ("go through staging memory" in log.read_text()) is (launch != "direct")
        assert ("row by row" in log.read_text()) is (launch == "direct")
