"""The executor on a CUDA device against transformers on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deltaserve.compute.collective.collective import ProcessCollective
from deltaserve.control.sched.plan import ItemOutcome, PlanItem, TokenValues
from deltaserve.core.ids import PageId, PoolId, RowId
from deltaserve.core.layout.shard import Shard
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from tests.compute.executor.test_launched import RULES, LaunchingDriver, of_others, outputs, rules, spoiled_results
from tests.compute.executor.world import Driver, check_generation, drawn, extend, random_tokens
from tests.gpu.unwaiting import check_launch_waits_for_nothing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["llama", "llama_llama3_rope", "qwen3", "qwen3_moe", "gpt_oss"])
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


def test_pages_may_be_read_when_execute_returns(tiny_models: Path) -> None:
    """A chunk that draws nothing asks the device for nothing: only a wait tells that its pages are written."""
    driver = Driver(tiny_models / "llama", device="cuda")
    prompt = random_tokens(200, 2)
    driver.open(0, prompt, SamplingParams(max_tokens=1, seed=0))
    driver.step([PlanItem(RowId(0), 0, 200, TokenValues(pack_u32(prompt)), samples=False)])
    assert torch.cuda.current_stream().query()


def test_a_step_without_memory_fails_its_requests_only(tiny_models: Path) -> None:
    driver = Driver(tiny_models / "llama", device="cuda")
    prompt = random_tokens(200, 2)
    driver.open(0, prompt)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    try:
        (failed,) = driver.step([extend(0, prompt, 0, 200)]).items
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed.outcome is ItemOutcome.FAILED
    driver.open(1, prompt)
    (item,) = driver.step([extend(1, prompt, 0, 200)], closes=[0]).items
    assert item.outcome is ItemOutcome.COMPUTED


def test_checksums_of_device_pages(tiny_models: Path) -> None:
    driver = Driver(tiny_models / "llama", device="cuda")
    memory = driver.executor.memory
    assert memory.regions()[0][1].device == "cuda:0"
    before = memory.checksums(PoolId(0), [PageId(1)])
    memory.kv.page_arenas[0].bytes[memory.kv.page_arenas[0].layout.page_bytes] ^= 1
    assert memory.checksums(PoolId(0), [PageId(1)]) != before


def test_ranks_add_up_what_a_gpu_has_computed(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        collective = ProcessCollective.join(Shard(rank, 2), tmp_path / "meet", 60.0)
        part = torch.full((2, 3), rank + 1.0, device="cuda")
        return collective.all_gather(part), collective.all_reduce(part)

    with ThreadPoolExecutor(2) as threads:
        for gathered, summed in threads.map(work, range(2)):
            assert (gathered.device.type, summed.device.type) == ("cuda", "cuda")
            assert gathered.tolist() == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
            assert summed.tolist() == [[3.0] * 3] * 2


def test_steps_launched_ahead_draw_what_steps_draw(tiny_models: Path) -> None:
    sampling = [rules(seed, **changes) for seed, changes in enumerate(RULES.values())]
    launching, alone = (kind(tiny_models / "llama", device="cuda") for kind in (LaunchingDriver, Driver))
    assert outputs(launching, sampling) == outputs(alone, sampling)


def test_one_step_that_is_not_finite_ends_that_request_only(tiny_models: Path) -> None:
    launching, alone = (kind(tiny_models / "llama", device="cuda") for kind in (LaunchingDriver, Driver))
    found = spoiled_results(launching, [0], {})
    assert found[1].items[0].outcome is ItemOutcome.NOT_FINITE
    assert of_others(found) == of_others(spoiled_results(alone, [], {}))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_launch_waits_for_nothing(tiny_models: Path, name: str) -> None:
    check_launch_waits_for_nothing(LaunchingDriver(tiny_models / name, device="cuda"))
