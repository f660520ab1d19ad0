"""Every value of the narrow dtypes, against torch's own conversion."""

import itertools

import pytest
import torch

from deltaserve.compute.memory.element_conversion import ElementConversion, torch_dtype
from deltaserve.core.layout.dtype import DType

CPU = torch.device("cpu")
PAIRS = [pair for pair in itertools.product(DType, DType) if pair[0] is not pair[1]]


def every_value(dtype: DType) -> torch.Tensor:
    """All bit patterns; of float32 some, beyond what fp8 holds as well."""
    if dtype is DType.FLOAT32:
        torch.manual_seed(0)
        return torch.cat([torch.randn(5000) * 300, torch.tensor([448.0, 449.0, -1e30, torch.inf, torch.nan, 0.0])])
    bits = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(torch_dtype(dtype))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: dtype.value)
def test_converts_as_torch_does_and_saturates(source: DType, target: DType) -> None:
    values = every_value(source)
    wanted = values.float()
    if target is DType.FP8_E4M3:
        wanted = wanted.clamp(-448, 448)
    wanted = wanted.to(torch_dtype(target))
    got = torch.empty(len(values) * target.itemsize, dtype=torch.uint8)
    conversion = ElementConversion(CPU)
    for _ in range(2):  # the second time with the tables of the first
        conversion.convert(values.view(torch.uint8), source, got, target)
        found = got.view(torch_dtype(target)).float()
        assert torch.equal(found.isnan(), wanted.float().isnan())
        assert torch.equal(found.nan_to_num(), wanted.float().nan_to_num())
