"""The native library of this tree for tests: compiled where it is not current, or the test is skipped."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deltaserve.base.rounding import Rounding
from deltaserve.native.compile_library import (
    EMULATED_TILES,
    KERNEL_FLAGS,
    LIBRARY_NAME,
    SOURCES,
    CannotCompile,
    compile_library,
    is_current,
)
from deltaserve.native.native_library import NativeContext, NativeLibrary

EMULATED_AMX = "amx_emulated"
ISAS = (*KERNEL_FLAGS["x86_64"], EMULATED_AMX)
_EMULATED_LIBRARY = Path(__file__).parents[2] / "out" / "tests" / "libdeltaserve_emulated.so"


def compiled_library() -> NativeLibrary:
    """Skips the test where there is no compiler."""
    return _library(SOURCES / LIBRARY_NAME)


def native_context(isa: str, num_threads: int = 1, rounding: Rounding = Rounding.OF_QUERY) -> NativeContext:
    """One of ISAS. Skips the test where the machine cannot run it."""
    library, name = compiled_library(), isa
    if isa == EMULATED_AMX:
        _EMULATED_LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        library, name = _library(_EMULATED_LIBRARY, (EMULATED_TILES,)), "amx_bf16"
    found = next((one for one in library.instruction_sets if one.name == name), None)
    if found is None:
        pytest.skip(f"this machine has no {name}" + (", nor avx512_bf16" if isa == EMULATED_AMX else ""))
    return NativeContext(library, found, num_threads, rounding)


def _library(path: Path, flags: Sequence[str] = ()) -> NativeLibrary:
    if not is_current(path):
        try:
            compile_library(path, flags)
        except CannotCompile as error:
            pytest.skip(str(error)[-300:])
    return NativeLibrary(path)
