"""Runs the simulator, or a test, over one mutated module, in a process of its own.

python -m tests.sim.mutation NAME FIRST NUM      prints the first seed in [FIRST, FIRST + NUM) that finds the mutant
python -m tests.sim.mutation NAME TEST           ends as pytest does: 1 where the test fails
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import signal
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType

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


def plant(mutant: Mutant) -> None:
    """Give the module, where it is loaded, the changed functions. Where more of it changes, or it is not loaded yet,
    have it imported from changed source. Once per process."""
    module = sys.modules.get(mutant.module)
    if module is not None and exchange_functions(module, mutant):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == mutant.module.partition(".")[0]]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutant))


def exchange_functions(module: ModuleType, mutant: Mutant) -> bool:
    """Give a loaded module the mutant's code. Do nothing, and return False, where not only functions differ, or some
    that nobody has any more, or that have made others while the module was imported."""
    loader = module.__spec__.loader if module.__spec__ is not None else None
    if not isinstance(loader, importlib.machinery.SourceFileLoader):
        return False
    old, new = loader.get_code(module.__name__), _Loader(loader, mutant).get_code(module.__name__)
    assert old is not None and new is not None
    changed = _changed_functions(old, new)
    if changed is None:
        return False
    gc.unfreeze()  # the process that was forked had all of it frozen, which nobody finds
    # the type itself: isinstance asks each object of all libraries for its class, and one of torch's warns then
    functions = [one for one in gc.get_objects() if type(one) is FunctionType and one.__module__ == module.__name__]
    gc.freeze()
    found, made = (
        [one for one in functions if one.__code__ in changed],
        {part for one in changed for part in _inner(one)},
    )
    if {one.__code__ for one in found} != changed.keys() or any(one.__code__ in made for one in functions):
        return False
    for one in found:
        one.__code__ = changed[one.__code__]
    return True


def _changed_functions(old: CodeType, new: CodeType) -> dict[CodeType, CodeType] | None:
    """Functions of a module, or of the body of a class, before |-> after. None where it differs in more."""
    changed: dict[CodeType, CodeType] = {}
    if _own(old) != _own(new):
        return None
    for before, after in zip(_parts(old), _parts(new), strict=True):
        if _whole(before) == _whole(after):
            continue
        if before.co_flags & inspect.CO_OPTIMIZED:
            more = {before: after} if before.co_freevars == after.co_freevars else None
        else:
            more = _changed_functions(before, after)
        if more is None:
            return None
        changed |= more
    return changed


def _parts(code: CodeType) -> list[CodeType]:
    return [value for value in code.co_consts if isinstance(value, CodeType)]


def _inner(code: CodeType) -> Iterator[CodeType]:
    for part in _parts(code):
        yield part
        yield from _inner(part)


def _own(code: CodeType) -> tuple[object, ...]:
    """All that the code does, wherever it stands; without its parts."""
    values = [(type(value), None if isinstance(value, CodeType) else value) for value in code.co_consts]
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    sizes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return (code.co_code, code.co_exceptiontable, values, names, sizes)


def _whole(code: CodeType) -> tuple[object, ...]:
    return (_own(code), [_whole(part) for part in _parts(code)])


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"one seed took more than {SEED_S} s of a processor")


def first_kill(mutant: Mutant, first: int, num_seeds: int) -> tuple[int, str] | None:
    """(seed, breach) of the first run that finds the mutant. Once per process: modules are loaded once."""
    plant(mutant)
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
    plant(mutant)
    preloaded = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
    return int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *preloaded, test]))


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
