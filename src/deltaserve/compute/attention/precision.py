"""How precisely float32 products are computed on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MIN_TILE = 2048
"""Keys x dim of one tile from which on the CPU library takes the same path for any number of tiles (measured)."""
_MATMUL = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
_USUAL = _MATMUL.fp32_precision


def may_round(dtype: torch.dtype, num_keys: int, dim: int) -> bool:
    """Whether tiles of a model in `dtype` may round their float32 factors to bfloat16: the factors were bfloat16."""
    return dtype == torch.bfloat16 and num_keys * dim >= _MIN_TILE


@contextmanager
def rounded_products() -> Iterator[None]:
    """Within: CPU products of float32 matrices may round factors to bfloat16; sums stay float32.

    It sends them to oneDNN, which rounds only where the processor gains by it. Measured on Zen 5: no rounding, and
    still twice as fast as the default library.

    The setting is of the process: one thread of it computes, but for ranks that are threads (tests). There the
    products of one may be rounded, or not, while another is within; afterwards the setting is what it always was,
    however they overlapped.
    """
    _MATMUL.fp32_precision = "bf16"
    try:
        yield
    finally:
        _MATMUL.fp32_precision = _USUAL
