"""A run that cannot leave, since a test left a thread behind."""

from pathlib import Path

from tests.own_runs import run_of

CONFTEST = """
import os
from tests import conftest

conftest._EXIT_S = 0.5

def pytest_configure(config):
    config.pluginmanager.register(conftest._Watch(config, os.dup(2)))
"""
TESTS = """
import threading

def test_leaves_a_thread(): threading.Thread(target=threading.Event().wait).start()
"""


def test_it_is_ended_with_all_stacks(tmp_path: Path) -> None:
    done = run_of(tmp_path, {"conftest.py": CONFTEST, "test_one.py": TESTS})
    assert "1 passed" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "in _shutdown" in done.stderr, "where the interpreter waits"
