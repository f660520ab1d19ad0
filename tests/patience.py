"""How long tests wait for what must come. tests/test_patience.py refuses other numbers for it.

A test never asks how fast anything is: it waits for a condition, and what ends the wait without it is a hang. The
number must lie beyond the slowest machine, not near the usual time: two cores with ten other jobs take twenty times as
long as an idle machine. It costs time only where something is broken. A test's own limit (`timeout` in pyproject.toml)
is several times as long, so that a wait fails first and says what it waited for; neither holds a compilation, which is
done in fixtures.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

PATIENCE_S = 600.0


@contextmanager
def killed_if_late(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Within it a process that hangs is killed when patience is over: that ends its output, and so whoever reads it."""
    limit = Timer(PATIENCE_S, process.kill)
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
