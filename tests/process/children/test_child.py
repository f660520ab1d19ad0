"""A child process as its parent has it."""

import signal
import sys
from collections.abc import Iterator

import pytest

from deltaserve.process.children.child import Child, ChildSpec, Kind
from deltaserve.process.children.log_file import OwnOutput
from deltaserve.process.children.notices import Welcome
from tests.process.worker.server import is_alive, wait_until, wait_until_gone


@pytest.fixture
def child() -> Iterator[Child]:
    argv = (sys.executable, "-c", "import time; time.sleep(3600)")
    made = Child(ChildSpec("sleeper", argv, Kind.DECODE), OwnOutput(), Welcome(None, ()))
    yield made
    made.signal(signal.SIGKILL)
    made.reap()


def test_a_stopped_child_is_told_from_one_that_runs(child: Child) -> None:
    assert not child.is_stopped()
    child.signal(signal.SIGSTOP)
    wait_until(child.is_stopped)
    child.signal(signal.SIGCONT)
    wait_until(lambda: not child.is_stopped())
    assert is_alive(child.pid)


def test_a_child_that_has_ended_is_not_stopped(child: Child) -> None:
    """Also before it is reaped: the kernel knows no child that could be."""
    child.signal(signal.SIGKILL)
    wait_until_gone(child.pid)
    assert not child.is_stopped()
