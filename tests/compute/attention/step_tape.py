"""What a CUDA graph does, on a CPU: operations are recorded with the tensors and numbers that they had, and repeated
without a line of the code that made them.

So whatever reaches a step by another way than the memory of the recorded tensors keeps the value that it had when it
was recorded, as in a graph. Operations that wait for the device, or whose sizes depend on data, raise as they do in a
capture. What a recording has made is spoiled when another one is replayed, as theirs may lie in the same memory. For a
process in which Triton's kernels are interpreted.
"""

import importlib
from collections.abc import Callable, Iterator
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
_Memory = dict[int, torch.UntypedStorage]
"""Where it begins |-> memory of tensors."""
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class StepTape:
    """A StepRecorder."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._made: dict[int, _Memory] = {}
        """Number of a recording |-> what it made."""
        self._given: set[int] = set()
        """Where memory begins that a recording found."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        calls: list[_Call] = []
        with _kernels_recorded(calls), _Recording(calls):
            run()
        number = self.num_recorded
        self.num_recorded += 1
        self._made[number] = self._made_by(calls)

        def replay() -> None:
            self.num_replayed += 1
            self._spoil(number)
            for call in calls:
                _repeat(*call)

        return replay

    def _made_by(self, calls: list[_Call]) -> "_Memory":
        made: _Memory = {}
        for _, args, kwargs, found in calls:
            self._given.update(_memory((args, kwargs)).keys() - made.keys())
            made |= {start: memory for start, memory in _memory(found).items() if start not in self._given}
        return made

    def _spoil(self, replayed: int) -> None:
        for number, made in self._made.items():
            for start, memory in made.items():
                if number != replayed and start not in self._given:
                    torch.empty(0, dtype=torch.uint8).set_(memory).fill_(0xFF)  # NaN, or -1


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


def _repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    """What comes of it stands where it stood, so that what was recorded behind it reads it there."""
    for kept, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(kept, Tensor) and kept.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            kept.copy_(new)


def _memory(found: Any) -> _Memory:
    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype is torch.bool
