"""What tests/gpu/test_pairs.py checks of a pair on a GPU, on a CPU."""

from pathlib import Path

import pytest

from tests.e2e.device_pairs import MICRO_MODEL, check_evicted_turns, check_unequal_pages
from tests.recall_models import STATE_MODEL


@pytest.mark.parametrize("model", [MICRO_MODEL, STATE_MODEL], ids=lambda model: model.name)
def test_turns_that_evict_each_other(model: Path) -> None:
    check_evicted_turns(model, "cpu")


def test_pages_of_unequal_size() -> None:
    check_unequal_pages("cpu")
