"""A front has uvloop's event loop where it is installed, and asyncio's elsewhere."""

import asyncio

import pytest

from deltaserve.process.front import event_loop
from tests.event_loops import both_loops


@both_loops
def test_the_loop_of_a_front(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    if loop == "asyncio":
        monkeypatch.setattr(event_loop, "uvloop", None)
    with asyncio.Runner(loop_factory=event_loop.loop_factory()) as runner:
        made = runner.get_loop()
        assert type(made).__module__.partition(".")[0] == loop
