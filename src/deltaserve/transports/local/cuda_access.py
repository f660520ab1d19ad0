"""Memory of a GPU behind `MemoryAccess`: mapped by its allocation's descriptor, copied by one kernel over a table.

The copies have a stream of their own, beside that of the steps, and are waited for: between two calls none is under
way, so the end of the stream is the fence, as the return of memmove is on the host.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from deltaserve.core.transport import TransportError
from deltaserve.transports.cuda_driver import CudaDriver, CudaError, CudaMapping
from deltaserve.transports.local.memory_access import Addresses
from deltaserve.transports.local.pieces import Pieces, cut
from deltaserve.transports.local.triton_copies import copy_pieces

log = logging.getLogger(__name__)

_MAX_PIECES = 1 << 16
"""Most pieces of one launch: a table of 1.5 MiB."""
_PROGRAMS = 64
"""Most programs of the kernel: half of a large GPU's multiprocessors, which are enough for a third of its bandwidth.
The steps beside it go on with the others."""
_BLOCK = 2048
"""What a program has under way at once: 8 bytes each where all is aligned, or else single bytes."""
_NUM_WARPS = 8
_WIDE_TRIAL, _BYTE_TRIAL = 200_000, 70_001
"""Bytes that are copied to try the kernel: more than a piece, and not whole ones."""


class _PeerMemory:
    """A peer's memory, mapped."""

    def __init__(self, mapping: CudaMapping) -> None:
        self.address = mapping.address
        self._mapping = mapping

    def close(self) -> None:
        try:
            self._mapping.close()
        except CudaError as error:  # of a device that is lost: the addresses stay taken
            log.warning("a peer's memory stays mapped: %s", error)


class CudaAccess:
    """Memory of one GPU, and of peers' GPUs that it reaches."""

    turn_bytes = 1 << 30
    """A few milliseconds at the most."""
    slice_bytes = 256 << 20

    def __init__(self, device: str) -> None:
        """`device`: `cuda:N`. For the thread that makes it. Compiles the kernel and tries it. Raises TransportError."""
        self._device = torch.device(device)
        if not torch.cuda.is_available():
            raise TransportError(f"torch sees no CUDA device, so there is no {device}")
        with _as_transport_errors():
            torch.cuda.set_device(self._device)
            self._driver = CudaDriver(self._device.index)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            # Allocated once: an allocation between steps can wait for them.
            self._in_host = torch.empty(3 * _MAX_PIECES, dtype=torch.int64, pin_memory=True)
            with torch.cuda.stream(self._stream):
                self._on_device = torch.empty(3 * _MAX_PIECES, dtype=torch.int64, device=self._device)
            self._try()

    def check(self, file: int, num_bytes: int) -> None:
        self.map(file, num_bytes).close()

    def map(self, file: int, num_bytes: int) -> _PeerMemory:
        with _as_transport_errors():
            return _PeerMemory(self._driver.map(file, num_bytes))

    def copy(self, targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
        pieces = cut(targets, sources, lengths)
        with _as_transport_errors():
            for start in range(0, pieces.table.shape[1], _MAX_PIECES):
                self._copy_some(Pieces(pieces.table[:, start : start + _MAX_PIECES], pieces.is_wide))

    def _copy_some(self, pieces: Pieces) -> None:
        num_pieces = pieces.table.shape[1]
        in_host, on_device = (table[: 3 * num_pieces] for table in (self._in_host, self._on_device))
        in_host.numpy().reshape(3, num_pieces)[:] = pieces.table
        programs = (min(num_pieces, _PROGRAMS),)
        with torch.cuda.stream(self._stream):
            try:
                on_device.copy_(in_host, non_blocking=True)
                copy_pieces[programs](on_device, num_pieces, IS_WIDE=pieces.is_wide, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
            finally:
                self._end.record(self._stream)
                self._end.synchronize()

    def _try(self) -> None:
        """Raises TransportError where the kernel copies something else than it should."""
        for size, first in ((_WIDE_TRIAL, 0), (_BYTE_TRIAL, 3)):
            with torch.cuda.stream(self._stream):
                source = torch.arange(1 << 18, device=self._device, dtype=torch.int64).view(torch.uint8)
                target = torch.zeros_like(source)
            self._stream.synchronize()
            spans = np.array([[target.data_ptr() + first], [source.data_ptr() + first], [size]], np.uint64)
            self.copy(*spans)
            with torch.cuda.stream(self._stream):
                wanted = torch.zeros_like(source)
                wanted[first : first + size] = source[first : first + size]
                is_right = torch.equal(target, wanted)
            if not is_right:
                raise TransportError(f"the kernel that copies pages is wrong on {self._device}")


@contextmanager
def _as_transport_errors() -> Iterator[None]:
    """Whatever CUDA, torch or the compiler raise is the transport's error."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:  # they share no base class
        line = str(error).strip().partition("\n")[0]
        raise TransportError(f"{type(error).__name__}: {line}") from error
