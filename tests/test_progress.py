"""What a run says while it runs, of a run of its own."""

import pytest

from tests.own_runs import run_of

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
    done = run_of(tmp_path_factory.mktemp("run"), {"conftest.py": CONFTEST, "test_few.py": TESTS}, "-n", "2")
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
