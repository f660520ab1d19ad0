"""The process of Triton's interpreter has no time limit of its own, so its death must be seen."""

import os
from collections.abc import Iterator

import pytest

from tests.compute.attention.triton_process import KernelProcess, interpreting_process, needs_triton, run_in


@pytest.fixture
def process() -> Iterator[KernelProcess]:
    yield from interpreting_process()


@needs_triton
def test_a_process_that_dies_in_a_check_is_told(process: KernelProcess) -> None:
    assert run_in(process, abs, -3) == 3
    with pytest.raises(AssertionError, match="died"):
        run_in(process, os._exit, 1)
