"""A run that cannot leave, since a test left a thread behind."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
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
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert "1 passed" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "in _shutdown" in done.stderr, "where the interpreter waits"
