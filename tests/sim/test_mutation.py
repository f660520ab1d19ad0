"""Mutants in modules that are loaded: functions get the code they would be imported with, all else is refused."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.sim.mutants import Mutant
from tests.sim.mutation import exchange_functions

NAME = "exchanged_functions"
SOURCE = """
from functools import cached_property, wraps

LIMIT = 3
SQUARES = [number * number for number in range(LIMIT)]

def limited(function):
    @wraps(function)
    def inner(number):
        return min(function(number), LIMIT)
    return inner

def plus(number, more=1):
    # to be removed
    return number + more

@limited
def doubled(number):
    return number * 2

class Counter:
    step = 5

    def __init__(self):
        self.count = 0

    @cached_property
    def next(self):
        return [self.count + self.step for _ in range(2)][0]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("number + more", "number - more", (0, 2, 5)),
        ("    # to be removed\n    return number + more", "    return 7", (7, 2, 5)),
        ("number * 2", "number + 2", (2, 3, 5)),
        ("self.count + self.step", "self.count - self.step", (2, 2, -5)),
        ("self.count = 0", "self.count = 1", (2, 2, 6)),
    ],
)
def test_functions_are_exchanged(module: ModuleType, old: str, new: str, expected: tuple[int, int, int]) -> None:
    """Whoever has them: those of a class, those behind a decorator."""
    plus, doubled, counter = module.plus, module.doubled, module.Counter
    assert (plus(1), doubled(1), counter().next) == (2, 2, 5)
    assert exchange_functions(module, Mutant("", "", NAME, old, new))
    assert (plus(1), doubled(1), counter().next) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("step = 5", "step = 6"),
        ("more=1", "more=2"),
        ("number * number", "number + number"),
        ("min(function(number), LIMIT)", "function(number)"),
        ("def plus", "@limited\ndef plus"),
    ],
)
def test_what_was_made_at_the_import_is_not(module: ModuleType, old: str, new: str) -> None:
    assert not exchange_functions(module, Mutant("", "", NAME, old, new))
    assert (module.plus(1), module.doubled(1), module.Counter().next, module.SQUARES) == (2, 2, 5, [0, 1, 4])
