"""What a run says while it runs, of a run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
import pytest
from tests import progress

progress._EVERY_S = 0.05

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(2, "few"))
"""
TESTS = """
import time, pytest

@pytest.fixture
def broken(): raise KeyError("no such thing")

def test_wrong(): assert 1 + 1 == 3, "the sum is wrong\\nand more of it"

def test_of_a_broken_fixture(broken): pass

@pytest.mark.parametrize("number", range(3))
def test_elsewhere(number): pytest.skip("needs another machine")

def test_slow(): time.sleep(1.0)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By such a run in two processes."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_few.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [*command, "--rootdir", str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 1, done.stderr
    return (done.stderr + done.stdout).splitlines()


def test_a_failure_is_told_at_once_with_its_place_and_reason(said: list[str]) -> None:
    assert "FAILED NOW test_few.py::test_wrong (call) test_few.py:7: AssertionError: the sum is wrong" in said
    assert "FAILED NOW test_few.py::test_of_a_broken_fixture (setup) test_few.py:5: KeyError: 'no such thing'" in said


def test_lines_count_what_is_done_and_name_what_runs(said: list[str]) -> None:
    running = [line for line in said if line.startswith("few ") and line.endswith("in test_few.py::test_slow")]
    assert running
    assert "of 6, " in running[-1]


def test_the_reasons_of_skips_are_counted(said: list[str]) -> None:
    assert "      3 x needs another machine" in said
