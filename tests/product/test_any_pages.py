"""Prefill and decode whose pages are of unequal sizes, or of unequal dtypes: answers as transformers gives them."""

import itertools
from pathlib import Path

import pytest

from deltaserve.control.transfer.staging import StagingMode
from deltaserve.core.layout.dtype import DType
from tests.compute.executor.world import TOLERANCE, random_tokens
from tests.product.in_process import DECODE, PREFILL, Pages, Product

SIZES = ((16, 64), (64, 16), (1, 16), (16, 48))
PATHS = {"direct": None, "staged": StagingMode.AUTO}
RANKS = {"llama": (1, 1), "qwen3": (2, 1), "deepseek_v3": (1, 2)}
QUICK = {("llama", 16, 64), ("llama", 1, 16), ("qwen3", 64, 16), ("deepseek_v3", 16, 48)}
"""The others take minutes."""
WIDE = {("llama", 16, 64, "staged"), ("llama", 1, 16, "direct"), ("deepseek_v3", 16, 48, "staged")}
"""Quick ones whose other path shows the sizes; other sizes show the path."""
DTYPES = {
    (DType.FLOAT32, DType.BFLOAT16): 0.02,
    (DType.FLOAT32, DType.FP8_E4M3): 0.2,
    (DType.BFLOAT16, DType.FP8_E4M3): 0.2,
    (DType.FP8_E4M3, DType.FLOAT32): 0.2,
}
"""(prefill, decode) |-> how far log-probabilities may be from those of float32."""


def marks_of(family: str, sizes: tuple[int, int], path: str) -> tuple[pytest.MarkDecorator, ...]:
    if (family, *sizes) not in QUICK:
        return (pytest.mark.slow,)
    return (pytest.mark.wide,) if (family, *sizes, path) in WIDE else ()


def cases() -> list[object]:
    return [
        pytest.param(
            family,
            *sizes,
            mode,
            marks=marks_of(family, sizes, path),
            id=f"{family}-{sizes[0]}-{sizes[1]}-{path}",
        )
        for family, sizes, (path, mode) in itertools.product(RANKS, SIZES, PATHS.items())
    ]


def serve_all_hits(product: Product, decode_size: int) -> None:
    """Cold, wholly and partly cached prompts; lengths that end inside a page of either side."""
    system, long, short = random_tokens(70, 1), random_tokens(53, 2), random_tokens(9, 3)
    (cold,) = product.serve([*system, *long])
    assert cold.decode_cached_len == 0
    assert cold.transferred_bytes > 0
    (whole,) = product.serve([*system, *long])
    assert whole.tokens == cold.tokens
    assert whole.decode_cached_len == 122 // decode_size * decode_size
    assert whole.transferred_bytes < cold.transferred_bytes
    partly, other = product.serve([*system, *short], [*random_tokens(20, 4)])
    assert partly.decode_cached_len == 70 // decode_size * decode_size
    assert other.decode_cached_len == 0


@pytest.mark.parametrize(("family", "writer", "reader", "staging"), cases())
def test_pages_of_unequal_sizes(
    tiny_models: Path, family: str, writer: int, reader: int, staging: StagingMode | None
) -> None:
    product = Product(tiny_models / family, *RANKS[family], (Pages(writer), Pages(reader)), staging=staging)
    serve_all_hits(product, reader)
    assert (product.worker(PREFILL).count("staged_writes") > 0) is (staging is not None)
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()


@pytest.mark.parametrize(("writer", "reader"), DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64)], ids=["equal", "unequal"])
@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_elements_are_converted_on_the_way(
    tiny_models: Path, ranks: tuple[int, int], writer: DType, reader: DType, sizes: tuple[int, int]
) -> None:
    """Measured, worst of all: 0.009 through bfloat16, 0.15 through fp8, in pages of both sizes.
    Other tiny models are no measure: fp8 on both sides, converted nowhere, takes them as far away, or chooses other
    experts."""
    pages = Pages(sizes[0], writer), Pages(sizes[1], reader)
    tolerance = DTYPES[writer, reader]
    product = Product(tiny_models / "llama", *ranks, pages, staging=StagingMode.AUTO, tolerance=tolerance)
    serve_all_hits(product, sizes[1])
    assert product.worst > TOLERANCE / 100, "nothing was rounded"
    assert product.worker(PREFILL).count("staged_writes") > 0
    assert product.worker(DECODE).count("writes_failed") == 0
    product.close()
