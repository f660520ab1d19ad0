"""What is counted for the scratch memory of a step is at least what the step keeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.flashinfer.kind import WRAPPER_BYTES
from deltaserve.compute.attention.scratch_limits import part_bytes
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.scratch import LOGPROB_POSITIONS, attention_bytes, pieces_bytes, scratch_bytes
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes
from tests.compute.attention.attention_world import POOL, Shape, World
from tests.compute.attention.test_fixed_step import OnDevice
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.layers.dense_heads import drafting
from tests.layer_parts import mla_of

SIZES = StepSizes("cpu", max_rows=20, step_len=512, context_len=4096, split_tokens=64, page_size=16)


@pytest.fixture
def spec(tiny_models: Path) -> ModelSpec:
    return load_spec(tiny_models / "llama")


@pytest.mark.parametrize(
    ("lens", "q_lens"),
    [
        ([4096], [1]),
        ([4096] + [100] * 39, [1] * 40),
        ([1000] * 40, [1] * 40),
        ([90] * 32, [16] * 32),
        ([4096, 4000, 3000], [16, 16, 2]),
        ([4096], [512]),
        ([512, 300], [512, 1]),
    ],
)
def test_attention_keeps_no_more_than_is_counted(spec: ModelSpec, lens: list[int], q_lens: list[int]) -> None:
    torch.set_num_threads(1)
    shape = Shape(SIZES.page_size, SIZES.split_tokens, 1, spec.num_kv_heads, 2, spec.head_dim)
    world = World(shape, lens)
    world.run(Batch(world.queries(q_lens), SIZES.split_tokens), 0, world.random_q(sum(q_lens)))
    assert 0 < world.backend.scratch_bytes <= attention_bytes(spec, SIZES)


@pytest.mark.parametrize(("lens", "q_lens"), [([4096] + [100] * 39, [1] * 40), ([90] * 32, [16] * 32), ([4096], [512])])
def test_attention_over_latents_keeps_no_more_than_is_counted(
    tiny_models: Path, lens: list[int], q_lens: list[int]
) -> None:
    torch.set_num_threads(1)
    spec = load_spec(tiny_models / "deepseek_v3")
    shape = Shape(
        SIZES.page_size, SIZES.split_tokens, 1, 1, spec.num_heads, spec.head_dim, latent_dim=mla_of(spec).kv_rank
    )
    world = World(shape, lens)
    world.run(Batch(world.queries(q_lens), SIZES.split_tokens), 0, world.random_q(sum(q_lens)))
    assert 0 < world.backend.scratch_bytes <= attention_bytes(spec, SIZES)


@pytest.mark.parametrize("window_len", [100, 127, 1000])
@pytest.mark.parametrize(
    ("lens", "q_lens"), [([4096] + [100] * 39, [1] * 40), ([190] * 32, [16] * 32), ([4096], [512])]
)
def test_attention_over_windows_keeps_no_more_than_is_counted(
    spec: ModelSpec, window_len: int, lens: list[int], q_lens: list[int]
) -> None:
    torch.set_num_threads(1)
    layers = (spec.layers[0], spec.layers[0]._replace(mixer=replace(spec.attention, window_len=window_len)))
    shape = Shape(SIZES.page_size, SIZES.split_tokens, 1, spec.num_kv_heads, 2, spec.head_dim, window_len=window_len)
    world = World(shape, lens)
    world.run(Batch(world.queries(q_lens), SIZES.split_tokens), 0, world.random_q(sum(q_lens)))
    assert 0 < world.backend.scratch_bytes <= attention_bytes(replace(spec, layers=layers), SIZES)


def check_kernels(spec: ModelSpec) -> None:
    sizes = StepSizes("cuda", max_rows=4, step_len=64, context_len=512, split_tokens=64, page_size=16)
    steps = (([512] * 2, [1] * 2), ([400, 300], [16, 3]), ([300], [64]))
    for window_len in (None, 100):
        for lens, q_lens in steps:
            shape = Shape(16, 64, 1, spec.num_kv_heads, 2, spec.head_dim, window_len=window_len, uses_triton=True)
            world = World(shape, lens)
            world.fill(q_lens)
            world.run(Batch(world.queries(q_lens), 64), 0, world.random_q(sum(q_lens)))
            assert 0 < world.backend.scratch_bytes <= part_bytes(spec, sizes) <= attention_bytes(spec, sizes)
    world = World(Shape(16, 64, 1, spec.num_kv_heads, 2, spec.head_dim, uses_triton=True), [512] * 4)
    backend: Any = world.backend
    for num_rows in (1, 2, 4):
        rows = OnDevice(world.tables.table(POOL), num_rows)
        assert backend.fixed_step(rows.rows, rows.put(Batch(world.queries([1] * num_rows), 64)))
    assert 0 < backend.scratch_bytes <= scratch_bytes(spec, sizes) - attention_bytes(spec, sizes)


@needs_triton
def test_kernels_for_gpus_keep_no_more_than_is_counted(process: KernelProcess, spec: ModelSpec) -> None:
    run_in(process, check_kernels, spec)


def check_flashinfer(spec: ModelSpec) -> None:
    sizes = StepSizes("cuda", max_rows=4, step_len=64, context_len=512, split_tokens=64, page_size=16)
    half = DType.FLOAT16
    for lens, q_lens in (([512] * 2, [1] * 2), ([400, 300], [16, 3]), ([300], [64])):
        shape = Shape(16, 64, 1, spec.num_kv_heads, 2, spec.head_dim, half, half, uses_flashinfer=True)
        world = World(shape, lens)
        world.fill(q_lens)
        world.run(Batch(world.queries(q_lens), 64), 0, world.random_q(sum(q_lens)))
        assert WRAPPER_BYTES < world.backend.scratch_bytes <= part_bytes(spec, sizes) + WRAPPER_BYTES
        assert part_bytes(spec, sizes) + WRAPPER_BYTES <= attention_bytes(spec, sizes)


@needs_triton
def test_flashinfer_keeps_no_more_than_is_counted(process_with_flashinfer: KernelProcess, spec: ModelSpec) -> None:
    run_in(process_with_flashinfer, check_flashinfer, spec)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_rank_counts_its_heads_and_the_logits_of_all_tokens(tiny_models: Path, name: str) -> None:
    spec = load_spec(tiny_models / name)
    one, two = (spec.local(Shard(0, size)) for size in (1, 2))
    assert attention_bytes(two, SIZES) < attention_bytes(one, SIZES)
    larger = replace(two, vocab_size=2 * spec.vocab_size)
    assert scratch_bytes(larger, SIZES) - scratch_bytes(two, SIZES) >= LOGPROB_POSITIONS * spec.vocab_size * 4
    assert two.vocab_size == spec.vocab_size


def test_recorded_steps_keep_scaled_logits_and_counts_of_all_rows(spec: ModelSpec) -> None:
    larger = replace(spec, vocab_size=2 * spec.vocab_size)
    on_cpu, on_gpu = (
        scratch_bytes(larger, sizes) - scratch_bytes(spec, sizes) for sizes in (SIZES, replace(SIZES, device="cuda"))
    )
    rows = ResidentRows(PageTable(1, SIZES.max_rows, 1), 1, SIZES.max_rows, torch.device("cpu"))
    tables, logits = rows.adjustments.tables(spec.vocab_size), rows.float_logits(spec.vocab_size)
    assert on_gpu - on_cpu == tables.counts.nbytes + logits.nbytes
    on_cpu, on_gpu = (scratch_bytes(spec, sizes) for sizes in (SIZES, replace(SIZES, device="cuda")))
    assert on_gpu - on_cpu > tables.counts.nbytes + tables.biases.nbytes + logits.nbytes


def test_where_nothing_is_recorded_nothing_is_counted_of_it(tiny_models: Path) -> None:
    """With a draft head its passes are recorded, and no pieces."""
    sizes = replace(SIZES, device="cuda", max_rows=4)
    for spec in (load_spec(tiny_models / "llama"), drafting(tiny_models, "llama_eagle3")[1]):
        recorded, plain = (scratch_bytes(spec, replace(sizes, may_record=may)) for may in (True, False))
        least = sizes.max_rows * spec.vocab_size * 4 * (1 if spec.draft is None else 2)
        assert recorded - plain >= least + (pieces_bytes(spec, sizes) if spec.draft is None else 0)
        on_cpu = replace(sizes, device="cpu")
        assert scratch_bytes(spec, on_cpu) == scratch_bytes(spec, replace(on_cpu, may_record=False))


def test_scratch_of_a_long_extend_does_not_grow_with_its_context(spec: ModelSpec) -> None:
    torch.set_num_threads(1)
    kept = []
    for length in (2048 + 200, 8 * 2048 + 200):
        world = World(Shape(16, 64, 1, 2, 2, 16), [length])
        batch = Batch((Query(0, length - 200, 200),), 64)
        world.run(batch, 0, world.random_q(200))
        kept.append(world.backend.scratch_bytes)
    assert kept[0] == kept[1]


def test_more_rows_longer_steps_and_contexts_count_more(spec: ModelSpec) -> None:
    base = scratch_bytes(spec, SIZES)
    larger = [
        StepSizes("cpu", 80, 512, 4096, 64, 16),
        StepSizes("cpu", 40, 1024, 4096, 64, 16),
        StepSizes("cpu", 40, 512, 65_536, 64, 16),
        StepSizes("cuda", 40, 512, 4096, 64, 16),
    ]
    assert all(scratch_bytes(spec, sizes) > base for sizes in larger)
