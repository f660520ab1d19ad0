"""Spans that are cut into pieces stay the same spans; and the kernel that copies pieces, by Triton's interpreter."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.transports.local.pieces import PIECE_BYTES, WIDE, cut
from tests.compute.attention.triton_process import (
    KernelProcess,
    compiling_process,
    interpreting_process,
    needs_triton,
    run_in,
)
from tests.transports.host_card import run_pieces

Spans = Sequence[tuple[int, int, int]]
"""(from, to, bytes) within two blocks of memory."""
CASES: dict[str, Spans] = {
    "one byte": [(0, 0, 1)],
    "one unit": [(16, 32, WIDE)],
    "a whole piece": [(0, 0, PIECE_BYTES)],
    "a piece and a unit": [(0, 16, PIECE_BYTES + WIDE)],
    "a piece and a byte": [(0, 16, PIECE_BYTES + 1)],
    "many pieces": [(0, 0, 5 * PIECE_BYTES + 48)],
    "several lengths": [(0, 4096, 4096), (200_000, 16, 48), (8192, 70_000, PIECE_BYTES * 2), (380_000, 300_000, 16)],
    "an odd source": [(1, 0, 4096)],
    "an odd target": [(0, 1, 4096)],
    "an odd length among others": [(0, 0, 4096), (4096, 8192, 33), (8208, 16384, 64)],
}
BLOCK_BYTES = 6 * PIECE_BYTES


def spans_in(source: torch.Tensor, target: torch.Tensor, spans: Spans) -> Any:
    src, dst, lengths = (np.array(numbers, np.uint64) for numbers in zip(*spans, strict=True))
    return dst + np.uint64(target.data_ptr()), src + np.uint64(source.data_ptr()), lengths


def blocks(spans: Spans) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source, target, and what the target has to hold: [BLOCK_BYTES] uint8 each."""
    source = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    wanted = torch.zeros_like(source)
    for src, dst, size in spans:
        wanted[dst : dst + size] = source[src : src + size]
    return source, torch.zeros_like(source), wanted


@pytest.mark.parametrize("spans", CASES.values(), ids=CASES)
def test_pieces_are_the_spans(spans: Spans) -> None:
    source, target, wanted = blocks(spans)
    pieces = cut(*spans_in(source, target, spans))
    assert pieces.table[2].max() <= PIECE_BYTES and pieces.table[2].min() > 0
    assert pieces.table[2].sum() == sum(size for _, _, size in spans)
    assert pieces.is_wide == all(number % WIDE == 0 for span in spans for number in span)
    run_pieces(pieces.table)
    assert torch.equal(target, wanted)


@pytest.fixture(scope="module")
def process() -> Iterator[KernelProcess]:
    yield from interpreting_process()


def copied_by_kernel(spans: Spans, programs: int) -> None:
    """In a process whose Triton interprets."""
    kernels: Any = importlib.import_module("deltaserve.transports.local.triton_copies")
    source, target, wanted = blocks(spans)
    pieces = cut(*spans_in(source, target, spans))
    table = torch.from_numpy(pieces.table)
    kernels.copy_pieces[(programs,)](table, table.shape[1], IS_WIDE=pieces.is_wide, BLOCK=2048)
    assert torch.equal(target, wanted)


@needs_triton
@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("spans", CASES.values(), ids=CASES)
def test_the_kernel_copies_what_the_table_says(process: KernelProcess, spans: Spans, programs: int) -> None:
    run_in(process, copied_by_kernel, spans, programs)


@pytest.fixture(scope="module")
def compiler() -> Iterator[KernelProcess]:
    yield from compiling_process()


def instructions(capability: int, is_wide: bool) -> str:
    """The kernel's PTX. In a process whose Triton compiles."""
    kernels: Any = importlib.import_module("deltaserve.transports.local.triton_copies")
    compiler: Any = importlib.import_module("triton.compiler")
    gpu: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    signature = {"table": "*i64", "num_pieces": "i32", "IS_WIDE": "constexpr", "BLOCK": "constexpr"}
    attrs = {(0,): [["tt.divisibility", 16]]}
    source = compiler.ASTSource(kernels.copy_pieces, signature, {"IS_WIDE": is_wide, "BLOCK": 2048}, attrs)
    return str(compiler.compile(source, target=gpu, options={"num_warps": 8}).asm["ptx"])


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_aligned_pieces_are_moved_16_bytes_at_once(compiler: KernelProcess, capability: int) -> None:
    ptx = run_in(compiler, instructions, capability, True)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx
    assert "st.global.b8" in run_in(compiler, instructions, capability, False)
