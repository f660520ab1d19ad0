"""Matrices of codes have the values they are made of, and the bytes that are counted for them."""

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from deltaserve.compute.weights.block_matrix import Codes, block_values, pack_codes, round_matrix, rounded_inputs
from deltaserve.compute.weights.gguf_blocks import codes_of
from deltaserve.model.formats.block_forms import INT8, TYPE_FORMS
from deltaserve.model.formats.gguf_header import QUANTISATIONS
from tests.compute.native.block_matrices import random_codes

KINDS = {kind.name: kind for kind in QUANTISATIONS.values() if kind.block_len > 1}


def test_every_type_of_a_file_has_a_form() -> None:
    assert TYPE_FORMS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_package(name: str) -> None:
    """Values of random bits; scales that are no numbers apart."""
    kind = KINDS[name]
    raw = np.random.default_rng(0).integers(0, 256, (70, 512 // kind.block_len, kind.block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        want = dequantize(raw.reshape(70, -1), GGMLQuantizationType[name])
        codes = codes_of(name, raw)
    got = block_values(pack_codes(TYPE_FORMS[name], (70, 512), [codes])).numpy()
    known = np.isfinite(want)
    assert known.mean() > 0.8
    assert np.array_equal(got[known], want[known])
    assert not np.isfinite(got[~known]).any()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 32, 45])
def test_bytes_are_those_counted(name: str, rows: int) -> None:
    form = TYPE_FORMS[name]
    codes = random_codes(form, rows, 96)
    matrix = pack_codes(form, (rows, 96), [codes])
    assert matrix.panels.numel() == form.num_bytes(rows, 96)
    scales = codes.scales.float().repeat_interleave(form.run_len, 1)
    offsets = 0.0 if codes.offsets is None else codes.offsets.float().repeat_interleave(form.run_len, 1)
    assert torch.equal(block_values(matrix), (codes.codes.float() - form.zero) * scales + offsets)


def test_rows_in_parts() -> None:
    codes = random_codes(TYPE_FORMS["Q4_1"], 75, 64)
    whole = pack_codes(TYPE_FORMS["Q4_1"], (75, 64), [codes])
    assert codes.offsets is not None
    parts = [Codes(codes.codes[rows], codes.scales[rows], codes.offsets[rows]) for rows in (slice(64), slice(64, None))]
    assert torch.equal(pack_codes(TYPE_FORMS["Q4_1"], (75, 64), parts).panels, whole.panels)


def test_rounded_matrices() -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    weight[3, 32:64] = 0.0
    weight[4] *= 1e-9
    values = block_values(round_matrix(weight))
    step = weight.view(50, -1, INT8.run_len).abs().amax(-1, keepdim=True) / 127
    # Half a step, and what a scale in float16 is off, at the ends 127 times.
    assert ((values - weight).view(50, -1, INT8.run_len).abs() <= step * (0.5 + 127 * 2**-11) + 2.0**-25 * 127).all()
    assert (values[3, 32:64] == 0.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e8])
def test_what_cannot_be_rounded_is_refused(bad: float) -> None:
    weight = torch.ones(3, 32)
    weight[1, 1] = bad
    with pytest.raises(ValueError, match="float16"):
        round_matrix(weight)


def test_rounded_inputs() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    step = x.view(5, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert ((rounded_inputs(x) - x).view(5, 2, 32).abs() <= step * 0.5001).all()
    assert torch.equal(rounded_inputs(torch.zeros(2, 32)), torch.zeros(2, 32))
