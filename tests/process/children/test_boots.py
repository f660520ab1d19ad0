"""Numbers of process starts."""

import pytest

from deltaserve.process.children.boots import new_boot


def test_later_starts_have_higher_numbers_that_fit_a_frame() -> None:
    first = new_boot(0)
    assert first < new_boot(first) < 1 << 64


def test_a_clock_that_was_set_back_changes_nothing_for_who_knows_the_former_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    former = new_boot(0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert new_boot(former) == former + 1
