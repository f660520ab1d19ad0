"""Attention over FlashInfer's wrappers against plain softmax, on a CPU: our plan, our pages and our merge are the real
ones, the wrapper is a reference of what FlashInfer documents (flashinfer_reference.py). What FlashInfer's kernels
compute only tests/gpu shows.
"""

import ast
import importlib
import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.compute.attention.attention import Batch
from deltaserve.core.errors import StateError
from deltaserve.core.layout.dtype import DType
from tests.compute.attention import flashinfer_reference
from tests.compute.attention.attention_world import Shape, World, check_against_plain, check_sharing_against_plain
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in

DTYPES = (
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.FP8_E4M3),
    (DType.FLOAT16, DType.FP8_E4M3),
)
LENS, QUERIES = (200, 1, 77, 31, 64), (1, 1, 20, 5, 17)
SINKS = torch.tensor([-2.0, 0.5, 3.0, 30.0])
HALF = Shape(num_layers=1, dtype=DType.FLOAT16, kv_dtype=DType.FLOAT16, uses_flashinfer=True)


@pytest.fixture
def process(process_with_flashinfer: KernelProcess) -> KernelProcess:
    return process_with_flashinfer


def check(process: KernelProcess, shape: Shape, sinks: torch.Tensor | None = None) -> None:
    run_in(process, check_against_plain, shape, LENS, QUERIES, sinks)


@needs_triton
@pytest.mark.parametrize(("page_size", "split_tokens"), [(1, 1), (1, 8), (2, 6), (16, 32), (16, 16), (64, 128)])
def test_mixed_batch_over_page_sizes(process: KernelProcess, page_size: int, split_tokens: int) -> None:
    lens, q_lens = (LENS, QUERIES) if split_tokens > 1 else ((40, 1, 17), (1, 1, 17))
    run_in(process, check_against_plain, replace(HALF, page_size=page_size, split_tokens=split_tokens), lens, q_lens)


@needs_triton
def test_layers_lie_one_behind_the_other(process: KernelProcess) -> None:
    check(process, replace(HALF, num_layers=3, split_tokens=64))


@needs_triton
@pytest.mark.parametrize(
    ("kv_heads", "group_size", "head_dim"), [(1, 1, 64), (2, 2, 64), (1, 7, 128), (2, 3, 128), (1, 4, 256)]
)
def test_mixed_batch_over_head_shapes(process: KernelProcess, kv_heads: int, group_size: int, head_dim: int) -> None:
    check(process, replace(HALF, split_tokens=64, kv_heads=kv_heads, group_size=group_size, head_dim=head_dim))


@needs_triton
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_mixed_batch_over_dtypes(process: KernelProcess, dtype: DType, kv_dtype: DType) -> None:
    check(process, replace(HALF, dtype=dtype, kv_dtype=kv_dtype))


@needs_triton
@pytest.mark.parametrize("window_len", [1, 5, 63, 100, 1000])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_windows_and_sinks(process: KernelProcess, window_len: int, sinks: torch.Tensor | None) -> None:
    check(process, replace(HALF, window_len=window_len), sinks)
    check(process, replace(HALF, page_size=1, split_tokens=20, window_len=window_len), sinks)


@needs_triton
def test_sinks_where_everything_is_seen(process: KernelProcess) -> None:
    check(process, HALF, SINKS)


@needs_triton
def test_long_queries_in_pieces_of_several_splits(process: KernelProcess) -> None:
    shape = replace(HALF, kv_heads=1)
    run_in(process, check_against_plain, shape, (700, 300), (100, 200))
    run_in(process, check_against_plain, replace(shape, window_len=150), (700, 300), (100, 200))


@needs_triton
@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("window_len", [None, 100])
def test_shared_splits(process: KernelProcess, dtype: DType, kv_dtype: DType, window_len: int | None) -> None:
    """Splits are shared by rows whose windows begin in different splits, and by extends beside decoding rows."""
    shape = replace(HALF, split_tokens=64, kv_heads=1, dtype=dtype, kv_dtype=kv_dtype, window_len=window_len)
    lens, common, q_lens = (210, 193, 140, 222, 209, 201), (0, 192, 128, 192, 192, 192), (1, 1, 3, 1, 16, 1)
    run_in(process, check_sharing_against_plain, shape, lens, common, q_lens, SINKS[:2])


def check_rounding() -> None:
    shape = replace(HALF, split_tokens=64)
    world = World(shape, (300, 260, 250), (0, 192, 192))
    world.fill((1, 1, 20))
    batch = Batch(world.queries((1, 1, 20)), shape.split_tokens)
    q = world.random_q(batch.num_tokens)
    difference = (world.run(batch, 0, q).double() - world.expected(batch, 0, q)).abs().max()
    assert float(difference) < 2e-3


@needs_triton
def test_the_difference_in_float16_is_what_is_promised(process: KernelProcess) -> None:
    """As far as partial results in 16 bits and our merge make one."""
    run_in(process, check_rounding)


def check_plans() -> None:
    """One plan for a step's layers; steps of a group that take turns plan anew each time, as does another scale."""
    shape = replace(HALF, num_layers=2)
    world = World(shape, (90, 50), (0, 32))
    world.fill((1, 20))
    backend: Any = world.backend
    wrappers = backend._wrappers[world.pool.page_arenas[0]]
    counts = [wrapper._wrapper for wrapper in (wrappers.whole, wrappers.causal)]
    batch = Batch(world.queries((1, 20)), shape.split_tokens)
    one, other = (backend.begin_step(batch)[0] for _ in range(2))
    q = world.random_q(batch.num_tokens)
    for layer in range(2):
        one.write_kv(layer, *torch.cat([world.kv[0][layer, :, 89:], world.kv[1][layer, :, 30:]], 1))
        one.attend(layer, q, 0.25)
    assert [count.num_plans for count in counts] == [1, 1]
    want = world.expected(batch, 1, q)
    for step in (other, one, other):
        torch.testing.assert_close(step.attend(1, q, shape.head_dim**-0.5).double(), want, atol=4e-3, rtol=4e-3)
    assert [count.num_plans for count in counts] == [4, 4]
    torch.testing.assert_close(other.attend(1, 2 * q, shape.head_dim**-0.5 / 2).double(), want, atol=4e-3, rtol=4e-3)
    assert [count.num_plans for count in counts] == [5, 5]


@needs_triton
def test_a_step_is_planned_once_and_two_may_take_turns(process: KernelProcess) -> None:
    run_in(process, check_plans)


def check_refusals() -> None:
    world = World(HALF, (20,))
    step = world.backend.begin_step(Batch(world.queries((1,)), 32))[0]
    for q in (world.random_q(2), world.random_q(1)[..., :8], world.random_q(1).float(), world.random_q(1).bfloat16()):
        with pytest.raises(StateError, match=r"queries of (shape|torch\.(float32|bfloat16) with pages)"):
            step.attend(0, q, 1.0)
    empty = world.backend.begin_step(Batch(world.queries((0,)), 32))[0]
    assert empty.attend(0, world.random_q(0), 1.0).shape == (0, 4, 16)


@needs_triton
def test_queries_of_another_step_or_type_are_refused(process: KernelProcess) -> None:
    run_in(process, check_refusals)


@needs_triton
@pytest.mark.parametrize("seed", range(8))
def test_random_worlds(process: KernelProcess, seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 16, 64])
    dtype, kv_dtype = rng.choice(DTYPES)
    shape = replace(
        HALF,
        page_size=page_size,
        split_tokens=max(16, page_size * rng.choice([1, 2, 4])),
        kv_heads=rng.choice([1, 2]),
        group_size=rng.choice([1, 2, 3, 5]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        window_len=rng.choice([None, None, 1, 40, 129]),
    )
    lens = [rng.choice([1, 2, 63, 64, 65, rng.randrange(1, 200)]) for _ in range(rng.randrange(1, 5))]
    q_lens = [rng.choice([1, min(length, 40), rng.randrange(1, length + 1)]) for length in lens]
    sinks = rng.choice([None, torch.randn(shape.num_heads)])
    run_in(process, check_against_plain, shape, lens, q_lens, sinks)


WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def parameters(source: Path, name: str) -> dict[str, set[str]]:
    """Parameters of a class's methods; of overloads the last, which is defined. The file is read, not imported:
    FlashInfer wants a GPU's libraries."""
    methods: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    methods[method.name] = {arg.arg for arg in (*method.args.args, *method.args.kwonlyargs)}
    return methods


def test_the_package_has_the_parameters_of_the_reference() -> None:
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("needs flashinfer: pip install 'deltaserve[flashinfer]'")
    theirs = parameters(Path(found.origin).parent / "prefill.py", WRAPPER)
    ours = parameters(Path(flashinfer_reference.__file__), WRAPPER)
    assert flashinfer_reference.PlanArguments.__annotations__.keys() <= theirs["plan"]
    for method in ("__init__", "run"):
        assert ours[method] <= theirs[method], method
