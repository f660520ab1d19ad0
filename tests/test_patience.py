"""The one law of waiting: a test that waits for what must come waits as long as tests/patience.py says.

httpx gives up after five seconds unless it is told otherwise, so a call of it says how long it waits.

Waits that are meant to run out ("nothing comes") take a second at most and are left alone. So are tests of the pure
packages, whose time is handed in.
"""

import ast
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience
from tests.patience import killed_if_late
from tests.test_architecture import PURE_PACKAGES

TESTS = Path(__file__).parent
OWN = ("patience.py", "test_patience.py")
KEYWORDS = ("timeout", "timeout_s", "within_s", "give_up_s", "patience_s")
"""Keyword arguments that end a wait."""
CALLS = {"wait": 0, "join": 0, "result": 0, "settimeout": 0, "timeout": 0, "wait_for": 1, "Timer": 0, "Timeout": 0}
"""Function -> which argument ends its wait."""
IMPATIENT = ("get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "Client", "AsyncClient")
"""Calls of httpx that end a wait where they have no `timeout`."""
NAMES = ("PATIENCE_S", "LIMIT_S", "TIMEOUT_S", "WITHIN_S", "GIVE_UP_S")
CLOCKS = ("monotonic", "perf_counter", "time")
MEANT_TO_RUN_OUT_S = 1.0


def _is_number(node: ast.expr, beyond: float) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > beyond


def _reads_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_impatient(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="httpx"), attr=name), keywords=words):
            return name in IMPATIENT and all(word.arg != "timeout" for word in words)
    return False


def _limits(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions below which a wait ends, of one node."""
    match node:
        case ast.Call():
            yield from (word.value for word in node.keywords if word.arg in KEYWORDS)
            place = CALLS.get(_called(node))
            if place is not None and len(node.args) > place:
                yield node.args[place]
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _reads_clock(left):
            yield right
        case ast.Compare(left=ast.BinOp(left=left, op=ast.Sub()), ops=[ast.Lt() | ast.LtE()], comparators=[limit]):
            if _reads_clock(left):
                yield limit
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.endswith(NAMES):
            yield value


def found(source: str) -> list[int]:
    """Lines with a number for how long a test waits, or with a wait that has one of its own."""
    nodes = list(ast.walk(ast.parse(source)))
    limits = [limit for node in nodes for limit in _limits(node)]
    lines = {limit.lineno for limit in limits if _is_number(limit, MEANT_TO_RUN_OUT_S)}
    return sorted(lines | {node.lineno for node in nodes if isinstance(node, ast.Call) and _is_impatient(node)})


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(argv, timeout=60)",
        "process.wait(60)",
        "thread.join(5.0)",
        "future.result(30)",
        "limit = asyncio.timeout(20)",
        "asyncio.wait_for(answer, 5)",
        "Timer(120, kill)",
        "pytest.mark.timeout(300)",
        "deadline = time.monotonic() + 10.0",
        "assert time.monotonic() - began < 5",
        "_LIMIT_S = 100.0",
        "START_PATIENCE_S = 20",
        "httpx.get(url)",
        "httpx.post(url, json=body, headers=headers)",
        "with httpx.stream('POST', url) as reply: pass",
        "_HTTP = httpx.Client(verify=PLAIN_HTTP)",
        "async with httpx.AsyncClient(base_url=url) as http: pass",
        "httpx.get(url, timeout=5)",
        "httpx.Timeout(20, read=seconds)",
    ],
)
def test_a_number_for_a_wait_is_found(source: str) -> None:
    assert found(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "process.wait(PATIENCE_S)",
        "links.wait(0.2)",
        "assert time.monotonic() - began > 2",
        "pytest.mark.timeout(0)",
        "names.join(words)",
        "httpx.get(url, timeout=PATIENCE_S)",
        "httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)",
        "server.http.get(path)",
        "httpx.Limits(max_connections=None)",
    ],
)
def test_other_waits_are_left_alone(source: str) -> None:
    assert not found(source)


def test_a_process_that_hangs_is_killed_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    with subprocess.Popen(["sleep", "3600"], stdout=subprocess.PIPE) as process, killed_if_late(process):
        assert process.stdout is not None
        assert process.stdout.read() == b""
    assert process.returncode == -signal.SIGKILL


def _files() -> list[Path]:
    files = (file for file in TESTS.rglob("*.py") if file.name not in OWN)
    return sorted(file for file in files if file.relative_to(TESTS).parts[0] not in PURE_PACKAGES)


def test_every_wait_is_as_long_as_patience_says() -> None:
    lines = [f"{file.relative_to(TESTS.parent)}:{line}" for file in _files() for line in found(file.read_text())]
    assert not lines, f"say PATIENCE_S of tests/patience.py instead of a number: {', '.join(lines)}"
