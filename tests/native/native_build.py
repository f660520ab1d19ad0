"""The native library of this tree for tests: compiled where it is not current, or the test is skipped."""

import pytest

from deltaserve.native.compile_library import LIBRARY_NAME, SOURCES, CannotCompile, compile_library, is_current
from deltaserve.native.native_library import NativeContext, NativeLibrary


def compiled_library() -> NativeLibrary:
    """Skips the test where there is no compiler."""
    if not is_current(SOURCES / LIBRARY_NAME):
        try:
            compile_library(SOURCES / LIBRARY_NAME)
        except CannotCompile as error:
            pytest.skip(str(error)[-300:])
    return NativeLibrary()


def native_context(isa: str, num_threads: int = 1) -> NativeContext:
    """Skips the test where the machine cannot run it."""
    library = compiled_library()
    found = next((one for one in library.instruction_sets if one.name == isa), None)
    if found is None:
        pytest.skip(f"this machine has no {isa}")
    return NativeContext(library, found, num_threads)
