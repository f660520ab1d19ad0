"""A fork that its supervisor did not adopt ends before it does anything: another process takes its place."""

import os
import select
import sys
from contextlib import nullcontext

import pytest

from deltaserve.process.children import preload as preloading
from deltaserve.process.children.child import Child, ChildSpec, Kind
from deltaserve.process.children.log_file import OwnOutput
from deltaserve.process.children.notices import Welcome
from deltaserve.process.children.preload import Preload
from tests.patience import PATIENCE_S
from tests.process.worker.server import CHILD, PROGRAMS, environment

CRASHING = ChildSpec("decode-0", (sys.executable, "-m", CHILD, "crash"), Kind.DECODE, environment())
"""It writes a line, and ends."""


def start_preload() -> Preload:
    argv = (sys.executable, str(PROGRAMS / "preload.py"), "forks")
    preload = Preload(ChildSpec("preload", argv, Kind.PREFILL, environment()), OwnOutput())
    while not preload.is_ready:
        assert select.select([preload.channel_fd], [], [], PATIENCE_S)[0]
        preload.hear()
        assert not preload.has_ended()
    return preload


@pytest.mark.parametrize("is_adopted", [True, False])
def test_only_an_adopted_fork_does_what_it_was_asked_to(is_adopted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_adopted:  # as in a sandbox that does not know of adoption
        monkeypatch.setattr(preloading, "_adopting", nullcontext)
    preload = start_preload()
    reads, writes = os.pipe()
    try:
        with nullcontext() if is_adopted else pytest.raises(ChildProcessError):
            child = Child(CRASHING, OwnOutput(writes), Welcome(None, ()), preload.fork)
        os.close(writes)
        with os.fdopen(reads, "rb") as output:
            assert output.read() == (b"the roof is on fire\n" if is_adopted else b"")  # to its end: that of the fork
        if is_adopted:
            assert child.reap() == 3
    finally:
        preload.end()
