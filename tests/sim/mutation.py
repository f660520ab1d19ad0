"""Runs the simulator over one mutated module, in a process of its own.

python -m tests.sim.mutation NAME FIRST NUM      prints the first seed in [FIRST, FIRST + NUM) that finds the mutant
python -m tests.sim.mutation NAME TEST           ends as pytest does: 1 where the test fails
"""

import importlib.abc
import importlib.machinery
import importlib.util
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType

import pytest

from tests.sim.mutants import MUTANTS, Mutant

SEED_S = 20
"""A seed that takes this process longer to compute has found a loop without end."""


class _Loader(importlib.abc.InspectLoader):
    """Loads one module from changed source."""

    def __init__(self, origin: importlib.machinery.SourceFileLoader, mutant: Mutant) -> None:
        self._origin = origin
        self._mutant = mutant

    def get_source(self, fullname: str) -> str:
        return mutated(self._origin.get_source(fullname) or "", self._mutant)

    def is_package(self, fullname: str) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before all others do."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            raise ImportError(f"{name} has no source")
        return importlib.util.spec_from_loader(name, _Loader(spec.loader, self._mutant), origin=spec.origin)


def mutated(source: str, mutant: Mutant) -> str:
    """Raises ValueError unless the line to change is there exactly once."""
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its line occurs {source.count(mutant.old)} times in {mutant.module}")
    return source.replace(mutant.old, mutant.new)


def mutated_module(mutant: Mutant) -> ModuleType:
    """The changed module, beside the one that everybody else has."""
    package, _, leaf = mutant.module.rpartition(".")
    origin, finder = importlib.import_module(mutant.module), _Finder(mutant)
    sys.meta_path.insert(0, finder)
    del sys.modules[mutant.module]
    try:
        return importlib.import_module(mutant.module)
    finally:
        sys.meta_path.remove(finder)
        sys.modules[mutant.module] = origin
        setattr(sys.modules[package], leaf, origin)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"one seed took more than {SEED_S} s of a processor")


def first_kill(mutant: Mutant, first: int, num_seeds: int) -> tuple[int, str] | None:
    """(seed, breach) of the first run that finds the mutant. Once per process: modules are loaded once."""
    sys.meta_path.insert(0, _Finder(mutant))
    signal.signal(signal.SIGPROF, _out_of_time)
    rig = importlib.import_module("deltaserve.sim.rig")
    for seed in range(first, first + num_seeds):
        signal.setitimer(signal.ITIMER_PROF, SEED_S)
        breach = rig.simulate(seed).breach
        signal.setitimer(signal.ITIMER_PROF, 0)
        if breach is not None:
            return seed, breach
    return None


def exit_code_of(mutant: Mutant, test: str) -> int:
    """What pytest says of a test with the mutant in its place. Once per process."""
    sys.meta_path.insert(0, _Finder(mutant))
    return int(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", test]))


def main(name: str, *arguments: str) -> int:
    mutant = next(m for m in MUTANTS if m.name == name)
    if len(arguments) == 1:
        return exit_code_of(mutant, arguments[0])
    first, num_seeds = map(int, arguments)
    killed = first_kill(mutant, first, num_seeds)
    print(f"{name} {killed[0]} {killed[1]}" if killed else f"{name} lives")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
