"""A process in which Triton's kernels run without a GPU, by its interpreter: it reads its switch when it is imported,
and other tests of a process may have imported it.
"""

import importlib
import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from tests.compute.attention.quick_interpreter import quicken

HAS_TRITON = importlib.util.find_spec("triton") is not None
Result = TypeVar("Result")
_COMPILED = Path(__file__).parents[3] / "out" / "tests" / "triton"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton: pip install 'deltaserve[triton]'")


@dataclass(frozen=True, slots=True)
class KernelProcess:
    """Runs one check after the other."""

    pool: Pool
    pid: int


def interpreting_process() -> Iterator[KernelProcess]:
    yield from _process(_interpret)


def compiling_process() -> Iterator[KernelProcess]:
    """The kernels are compiled in it. What comes of it is kept from run to run: Triton compiles anew what depends on a
    changed source, its own version or the target."""
    yield from _process(_compile, str(_COMPILED))


def run_in(process: KernelProcess, check: Callable[..., Result], *args: Any) -> Result:
    """Its error is raised here. Nothing but the test's own limit ends a check that hangs."""
    running = process.pool.apply_async(check, args)
    while not running.ready():
        running.wait(0.5)
        assert psutil.pid_exists(process.pid), "the process died in the check"
    return running.get()


def _process(begin: Callable[..., None], *args: str) -> Iterator[KernelProcess]:
    with multiprocessing.get_context("spawn").Pool(1, begin, args) as pool:
        pid = pool.apply(os.getpid)  # it has started: what it imports first is no part of a test's time
        yield KernelProcess(pool, pid)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("error", RuntimeWarning)
    importlib.import_module("torch").set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    def dot(_: Any, a: Any, b: Any, added: Any, *__: Any) -> Any:
        return interpreter.TensorHandle(_product(a.data, b.data) + added.data, added.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot
    quicken(interpreter)


def _compile(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


def _product(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """The interpreter's own is BLAS, which rounds a row by its place in the matrix: no kernel can make up for that."""
    product: npt.NDArray[np.float32] = np.einsum("ik,kj->ij", a.astype(np.float32), b.astype(np.float32))
    return product
