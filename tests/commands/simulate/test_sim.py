"""`sim faults` as a user sees it: what a few seeds hit too rarely is told only to who asks for the gates."""

from pathlib import Path

import pytest

from deltaserve.cli.main import main

FEW = ["sim", "faults", "--seeds", "1", "--from", "1", "--jobs", "1"]


def test_rare_cells_are_told_with_the_gates_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW) == 0
    assert "too rare" not in capsys.readouterr().out
    assert main([*FEW, "--gates"]) == 1
    assert "too rare: " in capsys.readouterr().out


def test_figures_that_cannot_be_written_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the run where that can be known, else behind all that it found."""
    nowhere = tmp_path / "none" / "figures.json"
    assert main([*FEW, "--json", str(nowhere)]) == 2
    out, err = capsys.readouterr()
    assert "there is no folder" in err and "runs/s" not in out
    assert main([*FEW, "--json", "/dev/full"]) == 1
    out = capsys.readouterr().out
    assert "runs/s" in out
    assert out.splitlines()[-1] == "--json /dev/full: No space left on device"
