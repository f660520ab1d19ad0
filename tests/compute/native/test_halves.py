"""The path for machines that have no instructions for halves rounds as torch does."""

import subprocess
from pathlib import Path

import pytest
import torch

from deltaserve.compute.native.compile_library import FLAGS, SOURCES, find_compiler
from tests.compute.native.native_build import compiled_library

DRIVER = Path(__file__).parent / "store_halves.cpp"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    compiled_library()  # or there is no compiler, and the test is skipped
    made = tmp_path / "store_halves"
    subprocess.run([*find_compiler(), *FLAGS, "-Wno-unused", "-I", SOURCES, DRIVER, "-o", made], check=True)
    return made


def test_floats_at_and_beside_every_half_and_every_middle_between_two(program: Path) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    exact = halves.float().view(torch.int32)
    around = [exact + offset for offset in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)]
    small = (torch.arange(-4096, 4096).float() * 2.0**-25).view(torch.int32)  # where denormals' middles are
    floats = torch.cat([*around, *(small + offset for offset in (-1, 0, 1))]).contiguous()
    done = subprocess.run([program], input=floats.numpy().tobytes(), capture_output=True, check=True)
    got = torch.frombuffer(bytearray(done.stdout), dtype=torch.float16)
    want = floats.view(torch.float32).half()
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[numbers], want.view(torch.int16)[numbers])
