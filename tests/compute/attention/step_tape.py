"""What a CUDA graph does, on a CPU: operations are recorded with the tensors and numbers that they had, and repeated
without a line of the code that made them.

So whatever reaches a step by another way than the memory of the recorded tensors keeps the value that it had when it
was recorded, as in a graph. Operations that wait for the device, or whose sizes depend on data, raise as they do in a
capture. What a recording allocated is overwritten before the next replay, as by other recordings from one pool.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_REFUSED = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique2", "lift_fresh", "repeat_interleave"}
)
"""They read the device's memory, or bring numbers of the host into it."""
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class TorchTape:
    """A StepRecorder of torch's operations."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._overwritten: list[torch.UntypedStorage] = []
        """What the last replay or recording allocated."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        calls: list[_Call] = []
        with self._all_recorded(calls):
            run()
        self.num_recorded += 1
        own = _allocated(calls)
        self._overwritten += own

        def replay() -> None:
            self.num_replayed += 1
            for storage in self._overwritten:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
            for call in calls:
                _repeat(*call)
            self._overwritten = own

        return replay

    def record_each(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self.record(run) for run in runs]

    @contextmanager
    def _all_recorded(self, calls: list[_Call]) -> Iterator[None]:
        with _Recording(calls):
            yield


class StepTape(TorchTape):
    """And of Triton's kernels, for a process in which they are interpreted."""

    @contextmanager
    def _all_recorded(self, calls: list[_Call]) -> Iterator[None]:
        with _kernels_recorded(calls), _Recording(calls):
            yield


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[_Call]) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _REFUSED or (name == "index" and any(_is_mask(index) for index in args[1])):
            raise RuntimeError(f"{func} in a step that is recorded")
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found


@contextmanager
def _kernels_recorded(calls: list[_Call]) -> Iterator[None]:
    """Launches are no operations of torch."""
    executor: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = executor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch(self, *args, **kwargs)
        calls.append((launch, (self, *args), kwargs, None))

    with patch.object(executor, "__call__", recorded):
        yield


def _allocated(calls: Sequence[_Call]) -> list[torch.UntypedStorage]:
    """What the recorded operations allocated."""
    outside: set[int] = set()
    own: dict[int, torch.UntypedStorage] = {}
    for _, args, kwargs, found in calls:
        outside.update(storage.data_ptr() for storage in _storages((args, kwargs)) if storage.data_ptr() not in own)
        own |= {storage.data_ptr(): storage for storage in _storages(found) if storage.data_ptr() not in outside}
    return list(own.values())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]
    return [tensor.untyped_storage() for tensor in tensors if tensor.numel()]


def _repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    """What comes of it stands where it stood, so that what was recorded behind it reads it there."""
    for kept, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(kept, Tensor) and kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            kept.copy_(new)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool
