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
    LEFT_OUT,
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
_EMULATED_BY = "avx512_bf16"


def sets_with_own(kernel: str) -> tuple[str, ...]:
    """Those of ISAS for which this file is compiled. Others have kernels of a former one (test_left_out_sets.py)."""
    return tuple(name for name in ISAS if ("amx_bf16" if name == EMULATED_AMX else name) not in LEFT_OUT[kernel])


def build_libraries(test_ids: Sequence[str]) -> None:
    """What tests of these names need."""
    _why_not(_LIBRARY)
    if any(EMULATED_AMX in test_id for test_id in test_ids) and EMULATED_AMX in sets_here():
        _emulated_library()


def compiled_library() -> NativeLibrary:
    """Skips the test where there is no compiler."""
    return _library(_LIBRARY)


def sets_here() -> tuple[str, ...]:
    """Those of ISAS that this machine can run. Empty where there is no compiler."""
    if _why_not(_LIBRARY) is not None:
        return ()
    names = tuple(one.name for one in NativeLibrary(_LIBRARY).instruction_sets)
    return (*names, EMULATED_AMX) if _EMULATED_BY in names else names


def native_context(isa: str, num_threads: int = 1, rounding: Rounding = Rounding.OF_QUERY) -> NativeContext:
    """One of ISAS. Skips the test where the machine cannot run it."""
    library, name = compiled_library(), isa
    if isa == EMULATED_AMX:
        if isa not in sets_here():
            pytest.skip(f"this machine has no amx_bf16, nor {_EMULATED_BY}")
        library, name = _emulated_library(), "amx_bf16"
    found = next((one for one in library.instruction_sets if one.name == name), None)
    if found is None:
        pytest.skip(f"this machine has no {name}")
    return NativeContext(library, found, num_threads, rounding)


def _emulated_library() -> NativeLibrary:
    """Its amx_bf16 has kernels of other sets, too, but none of these two."""
    return _library(_EMULATED, (EMULATED_TILES, "-O1"), ("generic", "avx2"))


def _library(path: Path, flags: tuple[str, ...] = (), unused: tuple[str, ...] = ()) -> NativeLibrary:
    reason = _why_not(path, flags, unused)
    if reason is not None:
        pytest.skip(reason)
    return NativeLibrary(path)


@cache
def _why_not(path: Path, flags: tuple[str, ...] = (), unused: tuple[str, ...] = ()) -> str | None:
    """Compiles the library where it is not current, once in a run; why that is not possible here."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "compile.lock").open("w") as lock:  # of two processes that want a library one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(path):
            try:
                compile_library(path, flags, unused)
            except CannotCompile as error:
                return str(error)[-300:]
    return None
