"""Processes of Triton's interpreter: started once in a run, and what they have imported stays."""

from collections.abc import Iterator

import pytest

from tests.compute.attention import flashinfer_reference
from tests.compute.attention.triton_process import KernelProcess, interpreting_process, run_in


@pytest.fixture(scope="session")
def process() -> Iterator[KernelProcess]:
    """No check may leave anything changed in it."""
    yield from interpreting_process()


@pytest.fixture(scope="session")
def process_with_flashinfer() -> Iterator[KernelProcess]:
    """In all of it the reference stands in the place of FlashInfer."""
    for process in interpreting_process():
        run_in(process, flashinfer_reference.stand_in)
        yield process
