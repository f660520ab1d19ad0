"""Random matrices of codes in every form for tests."""

import torch

from deltaserve.compute.weights.block_matrix import BlockMatrix, Codes, pack_codes
from deltaserve.model.formats.block_forms import BlockForm


def random_codes(form: BlockForm, rows: int, cols: int, seed: int = 0) -> Codes:
    """Weights of moderate size; some scales are negative, some are 0."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**form.bits, (rows, cols), generator=generator, dtype=torch.uint8)
    shape, size = (rows, cols // form.run_len), 2.0 ** (1 - form.bits)
    scales = torch.randn(shape, generator=generator) * size
    scales[scales.abs() < size / 20] = 0.0
    offsets = torch.randn(shape, generator=generator) if form.has_offsets else None
    if form.scale_bytes == 2:
        scales, offsets = scales.half(), None if offsets is None else offsets.half()
    return Codes(codes, scales, offsets)


def random_matrix(form: BlockForm, rows: int, cols: int, rounds_inputs: bool = False, seed: int = 0) -> BlockMatrix:
    return pack_codes(form, (rows, cols), [random_codes(form, rows, cols, seed)], rounds_inputs)
