"""`sim faults` as a user sees it: what a few seeds hit too rarely is told only to who asks for the gates."""

import pytest

from deltaserve.cli.main import main

FEW = ["sim", "faults", "--seeds", "1", "--from", "1", "--jobs", "1"]


def test_rare_cells_are_told_with_the_gates_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW) == 0
    assert "too rare" not in capsys.readouterr().out
    assert main([*FEW, "--gates"]) == 1
    assert "too rare: " in capsys.readouterr().out
