"""Cores that workers divide: who computes keeps the others off its own, and lends them when it does not."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.native.core_share import CoreShare
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.compute.weights.packing import pack
from tests.compute.native.native_build import compiled_library, native_context
from tests.compute.native.test_native_product import is_native
from tests.patience import PATIENCE_S


def share(path: Path, place: int, num_cores: int = 2, own_threads: int = 1) -> CoreShare:
    return CoreShare(str(path / "cores"), place, 2, num_cores, own_threads)


def worker(path: Path, place: int, num_cores: int = 2, own_threads: int = 1) -> NativeContext:
    context = native_context(compiled_library().instruction_sets[-1].name, num_cores)
    context.share_cores(share(path, place, num_cores, own_threads))
    return context


def borrowed(context: NativeContext) -> int:
    """By a step that computes now."""
    with context.computing(), context.borrowed_threads() as num_threads:
        return num_threads - context.own_threads


def wait_until_borrowed(context: NativeContext, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while borrowed(context) != count:
        assert time.monotonic() < deadline, borrowed(context)
        time.sleep(0.001)


def test_an_idle_workers_cores_are_lent(tmp_path: Path) -> None:
    prefill, decode = worker(tmp_path, 0), worker(tmp_path, 1)
    assert borrowed(prefill) == 1
    with decode.computing():
        assert borrowed(prefill) == 0
    wait_until_borrowed(prefill, 1)
    wait_until_borrowed(decode, 1)


def test_a_core_is_lent_once(tmp_path: Path) -> None:
    """Two idle cores, four wanted."""
    prefill, decode = worker(tmp_path, 0, 6, 2), worker(tmp_path, 1, 6, 2)
    with prefill.computing(), decode.computing():
        with prefill.borrowed_threads() as of_prefill, decode.borrowed_threads() as of_decode:
            assert (of_prefill, of_decode) == (4, 2)
        with decode.borrowed_threads() as of_decode:
            assert of_decode == 4


def test_fewer_threads_borrow_less(tmp_path: Path) -> None:
    """As many as are let compute while threads wait for cores."""
    alone = worker(tmp_path, 0, 8, 4)
    found = []
    for num_threads in (8, 6, 4, 2):
        alone.use_threads(num_threads)
        with alone.computing(), alone.borrowed_threads() as now:
            found.append((alone.own_threads, now))
    assert found == [(4, 8), (4, 6), (4, 4), (2, 2)]
    alone.use_threads(8)
    assert borrowed(alone) == 4


def test_a_worker_that_was_killed_while_it_computed_gets_its_place_again(tmp_path: Path) -> None:
    """Until then nobody borrows its core."""
    prefill = worker(tmp_path, 0)
    code = (
        "import os; from pathlib import Path; from tests.compute.native.test_shared_cores import worker\n"
        f"decode = worker(Path({str(tmp_path)!r}), 1)\n"
        "with decode.computing(), decode.borrowed_threads(): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert borrowed(prefill) == 0
    decode = worker(tmp_path, 1)
    assert borrowed(prefill) == 1
    assert borrowed(decode) <= 1


def test_a_context_that_is_gone_computes_no_more(tmp_path: Path) -> None:
    prefill, decode = worker(tmp_path, 0), worker(tmp_path, 1)
    with ExitStack() as never_ended:
        never_ended.enter_context(decode.computing())
        assert borrowed(prefill) == 0
        never_ended.pop_all()
    del decode, never_ended
    wait_until_borrowed(prefill, 1)


@pytest.mark.parametrize(("place", "own_threads"), [(-1, 1), (2, 1), (0, 0)])
def test_a_place_that_is_none(tmp_path: Path, place: int, own_threads: int) -> None:
    with pytest.raises(ValueError, match="no place among shared cores"):
        worker(tmp_path, place, 2, own_threads)


@torch.inference_mode()
def test_bits_do_not_depend_on_what_was_borrowed(tmp_path: Path) -> None:
    """Two workers in turns over one lent core: threads come and go in the middle of a product."""
    weight = pack(torch.randn(2000, 1100, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(64, 1100, generator=torch.Generator().manual_seed(1))
    alone = NativeOps(native_context(compiled_library().instruction_sets[-1].name))
    if not is_native(alone, weight):
        pytest.skip("torch multiplies here")
    want = alone.product(x, weight)
    wrong: list[str] = []

    def compute(place: int) -> None:
        context = worker(tmp_path, place, 3)
        ops = NativeOps(context)
        with torch.inference_mode():
            for _ in range(100):
                with context.computing():
                    if not torch.equal(ops.product(x, weight), want):
                        wrong.append(f"place {place}")

    threads = [threading.Thread(target=compute, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    after = worker(tmp_path, 0, 3)
    wait_until_borrowed(after, 2)
