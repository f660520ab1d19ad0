"""Attention, a step's operators and a prompt step on a GPU: what bench_attention.py measures with `--device cuda`.

Attention is one layer of one step, replayed as a CUDA graph with cold caches; its share is that of the rate at which
the card copies in the same run, reads and writes counted. Operators are replayed 50 times in one graph, and the host's
time of a call is that of asking for it. Weights and KV are random.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as functional
import triton
import triton.testing
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.attention_choice import make_attention
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.layers.step_ops import HeadNorm, StepOps, TorchOps
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.weights.weights import allocate
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.layers.layer_spec import Activation

DEVICE = torch.device("cuda")
PAGE_SIZE, SPLIT_TOKENS = 64, 256
CALLS = 50
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One layer of one step: rows of equal length that compute their last positions."""

    name: str
    num_rows: int
    length: int
    group_size: int = 4
    q_len: int = 1
    common: int = 0
    """Positions that lie on the same pages."""
    dtype: DType = DType.BFLOAT16
    window_len: int | None = None
    latent_dim: int | None = None
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def num_bytes(self) -> int:
        """Bytes of KV that have to be read once."""
        seen = min(self.length, self.length if self.window_len is None else self.window_len + self.q_len)
        positions = self.num_rows * seen - max(0, self.num_rows - 1) * min(self.common, seen)
        return positions * (1 if self.latent_dim else 2) * self.kv_heads * self.head_dim * self.dtype.itemsize


MLA = {"kv_heads": 1, "group_size": 16, "head_dim": 576, "latent_dim": 512}
CASES = (
    Case("32 x 8K", 32, 8192),
    Case("32 x 8K fp8", 32, 8192, dtype=DType.FP8_E4M3),
    Case("1 x 32K", 1, 32768),
    Case("128 x 1K, group 2", 128, 1024, group_size=2),
    Case("64 x (8K shared + 128)", 64, 8320, common=8192),
    Case("64 x (8K shared + 128) fp8", 64, 8320, common=8192, dtype=DType.FP8_E4M3),
    Case("64 x (8K shared + 128), group 2", 64, 8320, common=8192, group_size=2),
    Case("64 x 8K, window 1K", 64, 8192, window_len=1024),
    Case("32 x 4K MLA", 32, 4096, **MLA),  # type: ignore[arg-type]
    Case("32 x (4K shared + 128) MLA", 32, 4224, common=4096, **MLA),  # type: ignore[arg-type]
    Case("1 x 64, group 2", 1, 64, group_size=2),
    Case("prompt of 1,056, group 2", 1, 1056, group_size=2, q_len=1056),
    Case("prompt of 4,096 behind 4,096", 1, 8192, q_len=4096),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement on the device, and on the host where it is one of it."""

    name: str
    by: str
    device_us: float
    host_us: float | None = None
    share: float | None = None
    """Share of the rate at which the card copies."""


def copy_rate() -> float:
    """Bytes per second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms: float = triton.testing.do_bench(partial(target.copy_, source), return_mode="median")
    return 2 * source.numel() / ms * 1e3


def graph_of(run: Run, calls: int = 1) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def cold_us(run: Run) -> float:
    """Microseconds of one call that finds nothing in the caches."""
    ms: float = triton.testing.do_bench(graph_of(run).replay, return_mode="median")
    return ms * 1e3


def warm_us(run: Run) -> float:
    """Microseconds of one of many calls in a row."""
    ms: float = triton.testing.do_bench(graph_of(run, CALLS).replay, return_mode="median")
    return ms * 1e3 / CALLS


def host_us(run: Run) -> float:
    """Microseconds of asking for one, while the device has enough to do."""
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


def attention_of(case: Case, backend: str) -> Iterator[tuple[str, Run]]:
    """Calls of one layer: shared where pages are, and private."""
    planes = 1 if case.latent_dim else 2
    retention = KEEP_ALL if case.window_len is None else Retention(Lifetime.WINDOW, case.window_len)
    group = PageGroup(
        "kv", 1, case.kv_heads, case.head_dim, case.dtype, retention, planes=planes, latent_dim=case.latent_dim
    )
    cache = CacheSpec(PAGE_SIZE, (group,))
    count, common = cache.num_pages(case.length), case.common // PAGE_SIZE
    num_pages = common + case.num_rows * (count - common)
    pool, tables = KvPool(cache, (num_pages,), DEVICE), PageTable(1, case.num_rows, count)
    stored = pool.page_arenas[0].bytes
    if case.dtype is DType.FP8_E4M3:
        stored.random_(0, 0x70)
    else:
        stored.view(torch.bfloat16).normal_()
    order = [PageId(page) for page in torch.randperm(num_pages).tolist()]
    for row in range(case.num_rows):
        own = order[common + row * (count - common) :][: count - common]
        tables.write(PoolId(0), row, 0, (*order[:common], *own))
    num_heads = case.kv_heads * case.group_size
    made = make_attention(backend, None, pool, tables, (num_heads,))
    queries = tuple(Query(row, case.length - case.q_len, case.q_len) for row in range(case.num_rows))
    q = torch.randn(case.num_rows * case.q_len, num_heads, case.head_dim, device=DEVICE).bfloat16()
    shared = (Shared(0, case.common, tuple(range(case.num_rows))),) if case.common else ()
    for runs, suffix in ((shared, ""), ((), " private")) if shared else (((), ""),):
        step = made.begin_step(Batch(queries, SPLIT_TOKENS, runs))[0]
        yield f"{backend}{suffix}", partial(step.attend, 0, q, case.head_dim**-0.5)


def plain_attention(case: Case) -> Run | None:
    """Torch's own over KV that is contiguous; None: not for such a case."""
    if case.common or case.window_len or case.latent_dim or case.dtype is not DType.BFLOAT16:
        return None
    shape = (case.num_rows, case.kv_heads, case.length, case.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    q = k.new_empty(case.num_rows, case.kv_heads * case.group_size, case.q_len, case.head_dim).normal_()
    if case.q_len not in (1, case.length):
        return None
    return partial(functional.scaled_dot_product_attention, q, k, v, is_causal=case.q_len > 1, enable_gqa=True)


def attention_lines(case: Case, backend: str, rate: float) -> Iterator[Line]:
    """Times of the backend, and of torch over the same lengths."""
    num_bytes = case.num_bytes
    for by, run in attention_of(case, backend):
        us = cold_us(run)
        yield Line(case.name, by, us, host_us(run), num_bytes / us * 1e6 / rate)
    plain = plain_attention(case) if backend == "triton" else None
    if plain is not None:
        us = cold_us(plain)
        yield Line(case.name, "torch sdpa, contiguous", us, None, num_bytes / us * 1e6 / rate)


def operators(ops: StepOps, num_tokens: int) -> dict[str, Run]:
    """Operators of a layer of Qwen3-0.6B."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).bfloat16()

    x, added, weight, gate_up = (
        random(num_tokens, 1024),
        random(num_tokens, 1024),
        random(1024),
        random(num_tokens, 6144),
    )
    rows, norm = random(num_tokens, 32, 128), HeadNorm(random(24, 128), 1e-6)
    rope = random(num_tokens, 1, 128), random(num_tokens, 1, 128)
    return {
        "add and norm": partial(ops.add_norm, x, added, None, weight, 1e-6),
        "norm and turn heads": partial(ops.turned, rows[:, :24], norm, rope),
        "gate": partial(ops.gated, gate_up, Activation.SILU),
        "product, 1024 x 1024": partial(ops.product, x, random(1024, 1024)),
    }


def operator_lines() -> Iterator[Line]:
    for num_tokens in (1, 64, 1056):
        for ops in (TorchOps(), make_step_ops(None, torch.bfloat16, DEVICE)):
            for name, run in operators(ops, num_tokens).items():
                yield Line(f"{num_tokens} tokens: {name}", type(ops).__name__, warm_us(run), host_us(run))


def small_decoder(ops: StepOps) -> Decoder:
    """A decoder of the shape of Qwen3-0.6B."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = load_spec(Path(folder))
    weights, targets = allocate(spec, torch.bfloat16, DEVICE)
    for target in targets.values():
        target.normal_(std=0.02)
    return Decoder(spec, weights, ops)


def prompt_step(decoder: Decoder, num_tokens: int) -> Run:
    """A step of one prompt, as from its work list on."""
    cache = decoder.spec.cache_spec(PAGE_SIZE, DType.BFLOAT16, DType.FLOAT32)
    count = cache.num_pages(num_tokens)
    pool, tables = KvPool(cache, (count,), DEVICE), PageTable(1, 1, count)
    tables.write(PoolId(0), 0, 0, tuple(map(PageId, range(count))))
    backend = make_attention("auto", None, pool, tables, (16,))
    tokens = torch.randint(0, 1000, (num_tokens,), device=DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE)
    batch = Batch((Query(0, 0, num_tokens),), SPLIT_TOKENS)
    return lambda: decoder.forward(tokens, positions, backend.begin_step(batch))


def prompt_lines(num_tokens: int = 1056) -> Iterator[Line]:
    """A prompt step through 28 layers: the device's time is that between events around it, which is the host's where it
    asks for kernels more slowly than they are computed."""
    for ops in (TorchOps(), make_step_ops(None, torch.bfloat16, DEVICE)):
        step = prompt_step(small_decoder(ops), num_tokens)
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        launches = sum(event.count for event in profile.key_averages())
        ms: float = triton.testing.do_bench(step, return_mode="median")
        name = f"prompt step of {num_tokens} tokens, {launches} launches"
        yield Line(name, type(ops).__name__, ms * 1e3, host_us(step))


def shown(line: Line) -> str:
    host = "" if line.host_us is None else f"host {line.host_us:7.1f} us"
    share = "" if line.share is None else f"{line.share:4.0%} of copy"
    return f"{line.name:42} {line.by:24} {line.device_us:9.1f} us  {share:12} {host}"


@torch.inference_mode()
def measured(backends: tuple[str, ...] = ("triton",), cases: tuple[Case, ...] = CASES) -> Iterator[Line]:
    """All of it, line by line; a case that a backend refuses is told and left out."""
    rate = copy_rate()
    yield Line(f"copy of 1 GiB, {rate / 1e9:.0f} GB/s", torch.cuda.get_device_name(DEVICE), 2 * (1 << 30) / rate * 1e6)
    for case in cases:
        for backend in backends:
            try:
                yield from attention_lines(case, backend, rate)
            except Exception as problem:
                print(f"{case.name}, {backend}: {type(problem).__name__}: {problem}".partition("\n")[0], flush=True)
    yield from operator_lines()
    yield from prompt_lines()


def measure(told: TextIO = sys.stdout) -> list[Line]:
    """Tell each line when it is known."""
    lines = []
    for line in measured():
        print(shown(line), file=told, flush=True)
        lines.append(line)
    return lines
