"""The precision of float32 products is a setting of the process: it comes back whoever used it last."""

import torch

from deltaserve.compute.attention.precision import rounded_products


def precision() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def test_it_comes_back_however_uses_overlap() -> None:
    """As where ranks are threads: the one that began second ends last."""
    usual = precision()
    first, second = rounded_products(), rounded_products()
    first.__enter__()
    assert precision() == "bf16"
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert precision() == usual
