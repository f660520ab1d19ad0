"""The executor on a CUDA device against transformers on the CPU."""

from pathlib import Path

import pytest
import torch

from deltaserve.base.ids import PageId, PoolId
from deltaserve.base.sampling import SamplingParams
from tests.runner.world import Driver, check_generation, drawn, extend, random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["llama", "llama_llama3_rope", "qwen3", "qwen3_moe"])
def test_generation(tiny_models: Path, name: str) -> None:
    check_generation(Driver(tiny_models / name, device="cuda"), tiny_models / name)


def test_cpu_and_cuda_draw_the_same_tokens(tiny_models: Path) -> None:
    sampling = SamplingParams(max_tokens=12, seed=3, temperature=0.8, top_p=0.9, top_k=40)
    prompt, outputs = random_tokens(60, 1), []
    for device in ("cpu", "cuda"):
        driver = Driver(tiny_models / "llama", device=device)
        driver.open(0, prompt, sampling)
        out = [drawn(driver.step([extend(0, prompt, 0, 60)]).items[0])]
        while len(out) < 12:
            out.append(drawn(driver.step([driver.decode(0, 59 + len(out))]).items[0]))
        outputs.append(out)
    assert outputs[0] == outputs[1]


def test_checksums_of_device_pages(tiny_models: Path) -> None:
    driver = Driver(tiny_models / "llama", device="cuda")
    memory = driver.executor.memory
    assert memory.regions()[0][1].device == "cuda:0"
    before = memory.checksums(PoolId(0), [PageId(1)])
    memory.kv.arenas[0].bytes[memory.kv.arenas[0].layout.page_bytes] ^= 1
    assert memory.checksums(PoolId(0), [PageId(1)]) != before
