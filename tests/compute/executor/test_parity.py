"""The executor against transformers, float32: every position's whole distribution, and greedy tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.control.sched.plan import SharedRun
from deltaserve.core.ids import RowId
from deltaserve.core.layout.dtype import DType
from tests.cells import cells
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.world import (
    Driver,
    assert_same,
    check_generation,
    distribution,
    drawn,
    drawn_distribution,
    extend,
    random_tokens,
    reference_logprobs,
)
from tests.fixtures.tiny_models import VARIANTS, Variant, write_variant

FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == torch.float32]


class TorchDriver(Driver):
    """Computes attention by torch also where the native library is there."""

    attention = "torch"


class TritonDriver(Driver):
    attention = "triton"


@pytest.mark.parametrize("driver", [Driver, TorchDriver])
@pytest.mark.parametrize("name", FLOAT32)
def test_generation(tiny_models: Path, name: str, driver: type[Driver]) -> None:
    check_generation(driver(tiny_models / name), tiny_models / name)


def check_triton(path: Path) -> None:
    check_generation(TritonDriver(path), path, num_decode=3)


@needs_triton
@pytest.mark.parametrize("name", cells([("gpt_oss",), ("deepseek_v3",)], lambda name: name == "gpt_oss"))
def test_generation_with_kernels_for_gpus(process: KernelProcess, tiny_models: Path, name: str) -> None:
    """By Triton's interpreter: windows and sinks, layers that see everything, latents."""
    run_in(process, check_triton, tiny_models / name)


def test_a_checkpoint_in_bfloat16_computed_in_float32(tiny_models: Path) -> None:
    path = tiny_models / "llama_bf16"
    check_generation(Driver(path, dtype=DType.FLOAT32), path)


def test_generation_with_an_output_matrix_of_its_own_though_tied(tiny_models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models / "qwen3", tmp_path / "qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(272, 64, generator=torch.Generator().manual_seed(0)) / 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_generation(Driver(folder), folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_generation_by_the_text_part_of_a_multimodal_checkpoint(tiny_models: Path, tmp_path: Path, prefix: str) -> None:
    path = tiny_models / "gemma3_text"
    folder = shutil.copytree(path, tmp_path / "gemma3")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file(
        {**tensors, "vision_tower.weight": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    check_generation(Driver(folder), path)


def test_generation_with_the_head_dim_that_qwen3_assumes(tmp_path: Path) -> None:
    folder = write_variant(Variant(VARIANTS["qwen3"].build, {"head_dim": 128}), tmp_path / "qwen3")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("head_dim") == 128
    (folder / "config.json").write_text(json.dumps(config))
    check_generation(Driver(folder), folder)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 4), (16, 16), (64, 64)])
def test_generation_over_page_sizes(tiny_models: Path, page_size: int, split_tokens: int, name: str) -> None:
    path = tiny_models / name
    check_generation(Driver(path, page_size, split_tokens), path)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "tolerance"),
    [("qwen3", DType.FP8_E4M3, 1.5), ("qwen3", DType.BFLOAT16, 0.15), ("llama_bf16", DType.BFLOAT16, 0.6)],
)
def test_reduced_precision_stays_close(tiny_models: Path, name: str, kv_dtype: DType, tolerance: float) -> None:
    path = tiny_models / name
    got, want = prompt_distributions(Driver(path, kv_dtype=kv_dtype), path)
    assert_same(got, want, tolerance)
    assert (got - want).abs().mean() < tolerance / 8
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.BFLOAT16, 0.3), (DType.FLOAT16, 0.04)])
@pytest.mark.parametrize("name", ["minimax_m2", "deepseek_v3", "deepseek_v3_plain"])
def test_reduced_precision_of_experts_stays_close_at_most_positions(
    tiny_models: Path, name: str, dtype: DType, tolerance: float
) -> None:
    """Where two experts' scores are nearly equal, another one may be chosen: such positions differ by whole units."""
    path = tiny_models / name
    got, want = prompt_distributions(Driver(path, dtype=dtype), path)
    assert (got - want).abs().amax(-1).median() < tolerance
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


def prompt_distributions(driver: Driver, path: Path) -> tuple[Tensor, Tensor]:
    """[T, V] of a prompt in two chunks: ours, and what they should be."""
    prompt = random_tokens(100, 4)
    driver.open(0, prompt)
    parts = []
    for start, end in ((0, 60), (60, 100)):
        result = driver.step([extend(0, prompt, start, end)]).items[0]
        parts += [distribution(logprobs) for logprobs in result.prompt_logprobs]
    return torch.stack(parts), reference_logprobs(path, prompt)[:-1]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "llama_bf16", "deepseek_v3", "gemma3_text_scaled", "gpt_oss"])
def test_sharing_on_and_off_gives_equal_bits(tiny_models: Path, name: str) -> None:
    driver = Driver(tiny_models / name)
    prompt = random_tokens(101, 5)
    driver.open(0, prompt)
    driver.step([extend(0, prompt, 0, 101)])
    prompts = [prompt] + [prompt[:96] + random_tokens(5 + row, row) for row in range(1, 20)]
    firsts = [0]
    for row in range(1, 20):
        driver.open(row, prompts[row], capacity=112 + row, prefix_of=0, prefix_len=96)
        firsts.append(drawn(driver.step([extend(row, prompts[row], 96, len(prompts[row]))]).items[0]))
    items = [extend(row, [*tokens, firsts[row]], len(tokens), len(tokens) + 1) for row, tokens in enumerate(prompts)]
    alone = driver.step(items)
    rows = tuple(RowId(row) for row in range(20))
    together = driver.step(items, [SharedRun(0, 64, rows), SharedRun(64, 96, rows[3:])])
    assert [item.drawn for item in together.items] == [item.drawn for item in alone.items]
    assert (together.tokens_read, together.shared_tokens_read) == (alone.tokens_read, 64 * 19 + 32 * 16)
    assert alone.shared_tokens_read == 0


def test_a_prefix_on_another_rows_pages_is_the_same_prefix(tiny_models: Path) -> None:
    path = tiny_models / "llama"
    driver = Driver(path, split_tokens=16)
    first, second = random_tokens(90, 6), random_tokens(90, 6)[:64] + random_tokens(20, 7)
    driver.open(0, first)
    driver.step([extend(0, first, 0, 90)])
    driver.open(1, second, prefix_of=0, prefix_len=64)
    result = driver.step([extend(1, second, 64, 84)], closes=[0]).items[0]
    want = reference_logprobs(path, second)
    assert_same(drawn_distribution(result), want[-1])
    got = torch.stack([distribution(logprobs) for logprobs in result.prompt_logprobs])
    assert_same(got, want[64:-1])
