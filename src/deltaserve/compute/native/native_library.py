"""The native library of this very source tree: found and loaded, or why there is none; and what to compute with."""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltaserve.compute.native.compile_library import LIBRARY_NAME, SOURCES, sources_digest
from deltaserve.compute.native.core_share import CoreShare, SharedPage
from deltaserve.core.rounding import Rounding

_NEXT_STEP_NS = 5_000_000
"""After a step its cores are kept for another so long."""


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
        """Load the library. Raises NativeUnavailable."""
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
            raise NativeUnavailable(
                "made of other sources: run `make venv`, or `python -m deltaserve.compute.native.compile_library`"
            )

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        """Instruction sets of this machine, the fastest last."""
        names = [(number, self.functions.ds_isa_name(number)) for number in range(self.functions.ds_num_isas())]
        return tuple(InstructionSet(number, name.decode()) for number, name in names if name is not None)


class NativeContext:
    """What to compute with: an instruction set, the caller's thread and `num_threads` - 1 others, and scratch memory;
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
        functions.ds_context_share_cores.argtypes = (pointer, pointer, *(ctypes.c_int,) * 4)
        functions.ds_context_share_cores.restype = ctypes.c_bool
        functions.ds_context_begin.argtypes = functions.ds_context_borrow.argtypes = (pointer,)
        functions.ds_context_end.argtypes = (pointer, ctypes.c_int64)
        functions.ds_context_give_back.argtypes = (pointer, ctypes.c_int)
        self.functions = functions
        self.instruction_set = instruction_set
        self.rounding = rounding
        self._slower = [one for one in library.instruction_sets if one.number < instruction_set.number]
        self.num_threads = self._most_threads = num_threads
        address = functions.ds_context_new(num_threads)
        if not address:
            raise MemoryError("no memory for the threads of the native library")
        self.address = int(address)
        """Address of the DsContext."""
        self._pages: list[SharedPage] = []
        self._own_threads = num_threads
        weakref.finalize(self, _free, functions, self.address, self._pages)

    def use_slower_set(self) -> None:
        """The next slower instruction set. Raises NativeUnavailable where there is none."""
        if not self._slower:
            raise NativeUnavailable("no instruction set computes here what torch does")
        self.instruction_set = self._slower.pop()

    def use_threads(self, num_threads: int) -> None:
        """Let so many of its threads compute from the next step on."""
        self.num_threads = max(1, min(num_threads, self._most_threads))
        self.functions.ds_context_use_threads(self.address, self.num_threads)

    def share_cores(self, share: CoreShare) -> None:
        """Divide cores with other workers: threads beyond the share's own compute only where nobody else does. To be
        called before the first step. Raises OSError."""
        page = SharedPage(share)
        places = share.place, share.num_places, share.num_cores, share.own_threads
        if not self.functions.ds_context_share_cores(self.address, page.address, *places):
            raise ValueError(f"no place among shared cores: {share}")
        self._pages.append(page)
        self._own_threads = share.own_threads

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a step: others leave this worker's cores to it, and for a moment longer."""
        self.functions.ds_context_begin(self.address)
        try:
            yield
        finally:
            self.functions.ds_context_end(self.address, _NEXT_STEP_NS)

    @contextmanager
    def borrowed_threads(self) -> Iterator[int]:
        """How many may compute within, where threads of others than this library do."""
        num_threads = self.functions.ds_context_borrow(self.address)
        try:
            yield num_threads
        finally:
            self.functions.ds_context_give_back(self.address, num_threads)

    @property
    def own_threads(self) -> int:
        """Threads that compute next whether cores are free or not."""
        return min(self.num_threads, self._own_threads)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that are kept between steps."""
        return int(self.functions.ds_context_bytes(self.address))

    def free_scratch(self) -> None:
        """Steps begun before are over."""
        self.functions.ds_context_trim(self.address)


def _free(functions: ctypes.CDLL, address: int, pages: Sequence[SharedPage]) -> None:
    """`pages` must stay mapped until the context is gone."""
    functions.ds_context_free(address)


def library_problem() -> str | None:
    """Why the native library cannot compute in this process and its children; None: it can."""
    try:
        NativeLibrary()
    except NativeUnavailable as error:
        return str(error)
    return None
