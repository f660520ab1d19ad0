"""The native library of this tree for tests. It is compiled before the first test (tests/conftest.py), because no
test's time limit may hold a compilation; where it cannot be compiled, the tests that need it are skipped."""

import fcntl
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from deltaserve.compute.native.compile_library import (
    EMULATED_TILES,
    KERNEL_FLAGS,
    LIBRARY_NAME,
    SOURCES,
    CannotCompile,
    compile_library,
    is_current,
)
from deltaserve.compute.native.native_library import NativeContext, NativeLibrary
from deltaserve.core.rounding import Rounding

EMULATED_AMX = "amx_emulated"
ISAS = (*KERNEL_FLAGS["x86_64"], EMULATED_AMX)
BUILDS = Path(__file__).parents[3] / "out" / "tests"
_LIBRARY = SOURCES / LIBRARY_NAME
_EMULATED = BUILDS / "libdeltaserve_emulated.so"


def build_libraries(test_ids: Sequence[str]) -> None:
    """What tests of these names need."""
    _why_not(_LIBRARY)
    if any(EMULATED_AMX in test_id for test_id in test_ids):
        _why_not(_EMULATED, EMULATED_TILES, "-O1")


def compiled_library() -> NativeLibrary:
    """Skips the test where there is no compiler."""
    return _library(_LIBRARY)


def native_context(isa: str, num_threads: int = 1, rounding: Rounding = Rounding.OF_QUERY) -> NativeContext:
    """One of ISAS. Skips the test where the machine cannot run it."""
    library, name = compiled_library(), isa
    if isa == EMULATED_AMX:
        library, name = _library(_EMULATED, EMULATED_TILES, "-O1"), "amx_bf16"
    found = next((one for one in library.instruction_sets if one.name == name), None)
    if found is None:
        pytest.skip(f"this machine has no {name}" + (", nor avx512_bf16" if isa == EMULATED_AMX else ""))
    return NativeContext(library, found, num_threads, rounding)


def _library(path: Path, *flags: str) -> NativeLibrary:
    reason = _why_not(path, *flags)
    if reason is not None:
        pytest.skip(reason)
    return NativeLibrary(path)


@cache
def _why_not(path: Path, *flags: str) -> str | None:
    """Compiles the library where it is not current, once in a run; why that is not possible here."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "compile.lock").open("w") as lock:  # of two processes that want a library one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(path):
            try:
                compile_library(path, flags)
            except CannotCompile as error:
                return str(error)[-300:]
    return None
