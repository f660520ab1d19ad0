"""Prefill and decode on one GPU, as processes of a server: the checks of tests/e2e/device_pairs.py, which a CPU passes.

No GPU has run them yet.
"""

from pathlib import Path

import pytest
import torch

from tests.compute.attention.triton_process import needs_triton
from tests.e2e.device_pairs import MICRO_MODEL, check_evicted_turns, check_unequal_pages
from tests.recall_models import STATE_MODEL

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]


@pytest.mark.parametrize("model", [MICRO_MODEL, STATE_MODEL], ids=lambda model: model.name)
def test_turns_that_evict_each_other(model: Path) -> None:
    check_evicted_turns(model, "cuda")


def test_pages_of_unequal_size() -> None:
    check_unequal_pages("cuda")
