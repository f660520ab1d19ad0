"""Finds and loads the native library of this very source tree, or says why there is none."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from deltaserve.native.compile_library import LIBRARY_NAME, SOURCES, sources_digest


class NativeUnavailable(Exception):
    """Why the library cannot be used: one line for the operator."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that this machine can run."""

    number: int
    name: str


class NativeLibrary:
    """The loaded library. ctypes gives up Python's lock for the time of a call."""

    def __init__(self, path: Path = SOURCES / LIBRARY_NAME) -> None:
        """Raises NativeUnavailable."""
        if not path.exists():
            raise NativeUnavailable("not compiled: no C++ compiler when deltaserve was installed")
        try:
            self.functions = ctypes.CDLL(str(path))
            self.functions.ds_sources.restype = ctypes.c_char_p
            self.functions.ds_isa_name.restype = ctypes.c_char_p
            made_of = self.functions.ds_sources().decode()
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path.name} does not load: {error}") from None
        if sources_digest() not in (None, made_of):
            raise NativeUnavailable("made of other sources: run `python -m deltaserve.native.compile_library`")

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        """Those of this machine, the fastest last."""
        names = [(number, self.functions.ds_isa_name(number)) for number in range(self.functions.ds_num_isas())]
        return tuple(InstructionSet(number, name.decode()) for number, name in names if name is not None)
