"""The native library of this very source tree: found and loaded, or why there is none; and what to compute with."""

import ctypes
import weakref
from dataclasses import dataclass
from pathlib import Path

from deltaserve.base.rounding import Rounding
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


class NativeContext:
    """With what to compute: an instruction set, the caller's thread and `num_threads` - 1 others, and scratch memory;
    and how to round.

    For one thread at a time; whatever computes with it may share it.
    """

    def __init__(
        self,
        library: NativeLibrary,
        instruction_set: InstructionSet,
        num_threads: int = 1,
        rounding: Rounding = Rounding.OF_QUERY,
    ) -> None:
        """`instruction_set`: one of the library's."""
        pointer, functions = ctypes.c_void_p, library.functions
        functions.ds_context_new.restype, functions.ds_context_new.argtypes = pointer, (ctypes.c_int,)
        functions.ds_context_bytes.restype, functions.ds_context_bytes.argtypes = ctypes.c_int64, (pointer,)
        functions.ds_context_free.argtypes = functions.ds_context_trim.argtypes = (pointer,)
        functions.ds_context_use_threads.argtypes = (pointer, ctypes.c_int)
        self.functions = functions
        self.instruction_set = instruction_set
        self.rounding = rounding
        self._slower = [one for one in library.instruction_sets if one.number < instruction_set.number]
        self.num_threads = self._most_threads = num_threads
        address = functions.ds_context_new(num_threads)
        if not address:
            raise MemoryError("no memory for the threads of the native library")
        self.address = int(address)
        """Of the DsContext."""
        weakref.finalize(self, functions.ds_context_free, self.address)

    def use_slower_set(self) -> None:
        """The next slower instruction set. Raises NativeUnavailable where there is none."""
        if not self._slower:
            raise NativeUnavailable("no instruction set computes here what torch does")
        self.instruction_set = self._slower.pop()

    def use_threads(self, num_threads: int) -> None:
        """Of those it was made with, so many compute from the next step on."""
        self.num_threads = max(1, min(num_threads, self._most_threads))
        self.functions.ds_context_use_threads(self.address, self.num_threads)

    @property
    def scratch_bytes(self) -> int:
        """Kept between steps."""
        return int(self.functions.ds_context_bytes(self.address))

    def free_scratch(self) -> None:
        """Steps begun before are over."""
        self.functions.ds_context_trim(self.address)
