"""Bytes as people read them."""

import pytest

from deltaserve.core.sizes import size, sizes_apart


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (3 << 19, "1.5 MiB"), (17179869184, "16.0 GiB")],
)
def test_sizes(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words


@pytest.mark.parametrize(
    ("larger", "smaller", "words"),
    [
        (1280, 1024, ("1,280 B", "1,024 B")),
        ((64 << 20) + 256, 64 << 20, ("67,109,120 B", "67,108,864 B")),
        (1 << 20, 1 << 10, ("1.0 MiB", "1 KiB")),
        (1024, 1024, ("1 KiB", "1 KiB")),
    ],
)
def test_two_sizes_that_differ_read_so(larger: int, smaller: int, words: tuple[str, str]) -> None:
    assert sizes_apart(larger, smaller) == words
