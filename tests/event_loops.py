"""The event loops that a front may have, for tests of what it does with sockets, timers and streams."""

import asyncio
from collections.abc import Coroutine
from importlib.util import find_spec

import pytest

from deltaserve.process.front.event_loop import loop_factory

_IS_THERE = find_spec("uvloop") is not None
_needs_uvloop = pytest.mark.skipif(not _IS_THERE, reason="uvloop is not installed (it has no build for this system)")

both_loops = pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=_needs_uvloop)])
"""For a test that runs its own: `run_in(loop, ...)`."""

on_both_loops = pytest.mark.parametrize(
    "anyio_backend",
    [
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop", marks=_needs_uvloop),
    ],
)
"""For a test that is a coroutine."""


def run_in(loop: str, main: Coroutine[object, object, None]) -> None:
    """Run `main` in a new loop of this name: asyncio's, or the one that a front takes where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory() if loop == "uvloop" else None) as runner:
        runner.run(main)
