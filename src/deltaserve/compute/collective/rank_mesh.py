"""How ranks that are processes of one machine meet: a socket between each two of them, and memory that all have mapped.

What is exchanged lies in the memory; the sockets only say that it is there. So a rank that waits sleeps in the kernel
and wakes at once, nobody polls, and a rank that is gone is seen by the end of its connection.
"""

import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.core.layout.shard import Shard

SLOT_BYTES = 1 << 20
"""Bytes of a rank's part of one exchange."""
NUM_TURNS = 2
_HELLO = struct.Struct("<I")
_READY = struct.Struct("<QQ")
"""Number of the exchange, and its bytes."""
_TIMEVAL = struct.Struct("@ll")
_CONNECT_EVERY_S = 0.01


def meet(shard: Shard, meeting_point: Path, timeout_s: float) -> tuple[list[socket.socket], Tensor]:
    """Sockets to the others, in their order, and memory [2, ranks, SLOT_BYTES] uint8 that all have mapped.

    Returns when all are there. `timeout_s`: of this, and of every send and receive. Raises CollectiveError.
    """
    deadline = time.monotonic() + timeout_s
    others: dict[int, socket.socket] = {}
    try:
        with _listener(meeting_point, shard.rank) as listener:
            for rank in range(shard.rank):
                others[rank] = _connect(meeting_point, rank, deadline)
                others[rank].send(_HELLO.pack(shard.rank))
            for _ in range(shard.rank + 1, shard.size):
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                other, _ = listener.accept()
                other.settimeout(timeout_s)
                others[_HELLO.unpack(other.recv(_HELLO.size))[0]] = other
        memory = _share(others, shard) if shard.rank == 0 else _receive(others[0], shard)
    except (OSError, struct.error) as error:
        close_all(others.values())
        raise CollectiveError(f"ranks: not all of them met within {timeout_s:g} s: {error}") from None
    limit_waits(others.values(), timeout_s)
    return [others[rank] for rank in sorted(others)], memory


def limit_waits(sockets: Iterable[socket.socket], timeout_s: float) -> None:
    """Limit every send and receive; blocking ones raise BlockingIOError then."""
    whole = int(timeout_s)
    packed = _TIMEVAL.pack(whole, int((timeout_s - whole) * 1e6))
    for each in sockets:
        each.settimeout(None)  # the kernel's own limits cost no further calls
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            each.setsockopt(socket.SOL_SOCKET, side, packed)


def close_all(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


class RankMesh:
    """One rank's end. For one thread."""

    def __init__(self, shard: Shard, others: Sequence[socket.socket], memory: Tensor) -> None:
        """`others`: to the other ranks, in their order. `memory` [2, ranks, SLOT_BYTES] uint8."""
        self.shard = shard
        self._others = others
        self._memory = memory
        self._number = 0
        weakref.finalize(self, close_all, others)

    @classmethod
    def join(cls, shard: Shard, meeting_point: Path, timeout_s: float) -> "RankMesh":
        """Returns when all ranks are there. `meeting_point`: a path, in a folder that only this user may enter, that no
        group has used before. `timeout_s`: of this and of every exchange. Raises CollectiveError."""
        others, memory = meet(shard, meeting_point, timeout_s)
        return cls(shard, others, memory)

    def limit(self, timeout_s: float) -> None:
        """Limit every exchange."""
        limit_waits(self._others, timeout_s)

    def exchange(self, part: Tensor) -> Tensor:
        """part [n] uint8, at most SLOT_BYTES -> [ranks, n], valid until the next exchange. Raises CollectiveError.

        There are two turns of memory: whoever is in exchange k + 1 has read what k gave it, so k + 2 may overwrite.
        """
        slots = self._memory[self._number % NUM_TURNS, :, : part.numel()]
        slots[self.shard.rank] = part
        self._number += 1
        said = _READY.pack(self._number, part.numel())
        try:
            for other in self._others:
                other.send(said)
            heard = [other.recv(_READY.size) for other in self._others]
        except BlockingIOError:
            raise CollectiveError("ranks: one did not come in time") from None
        except OSError as error:
            raise CollectiveError(f"ranks: one is gone: {error.strerror}") from None
        for message in heard:
            if message != said:
                raise CollectiveError("ranks: one is gone" if not message else "ranks: they do not compute the same")
        return slots


def _listener(meeting_point: Path, rank: int) -> socket.socket:
    listener = _socket()
    try:
        listener.bind(_address(meeting_point, rank))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _connect(meeting_point: Path, rank: int, deadline: float) -> socket.socket:
    """Tries until that rank listens."""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"rank {rank} does not listen")
        other = _socket()
        other.settimeout(left_s)
        try:
            other.connect(_address(meeting_point, rank))
            return other
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            other.close()
            time.sleep(_CONNECT_EVERY_S)
        except OSError:
            other.close()
            raise


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(meeting_point: Path, rank: int) -> str:
    return f"{meeting_point}.{rank}"


def _share(others: dict[int, socket.socket], shard: Shard) -> Tensor:
    """The first rank makes the memory and hands it to all."""
    file = os.memfd_create("deltaserve-ranks")
    try:
        os.ftruncate(file, NUM_TURNS * shard.size * SLOT_BYTES)
        for other in others.values():
            socket.send_fds(other, [b"memory"], [file])
        return _map(file, shard)
    finally:
        os.close(file)


def _receive(first: socket.socket, shard: Shard) -> Tensor:
    _, files, *_ = socket.recv_fds(first, 16, 1)
    if not files:
        raise ConnectionResetError("the first rank is gone")
    try:
        return _map(files[0], shard)
    finally:
        os.close(files[0])


def _map(file: int, shard: Shard) -> Tensor:
    """The mapped memory as a tensor: [2, ranks, SLOT_BYTES] uint8."""
    shape = (NUM_TURNS, shard.size, SLOT_BYTES)
    return torch.frombuffer(mmap.mmap(file, NUM_TURNS * shard.size * SLOT_BYTES), dtype=torch.uint8).view(shape)
