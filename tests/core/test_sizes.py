"""Bytes as people read them."""

import pytest

from deltaserve.core.sizes import size


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (3 << 19, "1.5 MiB"), (17179869184, "16.0 GiB")],
)
def test_sizes(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words
