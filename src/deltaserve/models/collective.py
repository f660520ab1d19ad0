"""How the ranks of a worker add up and put together what each has computed.

Ranks compute the same steps; which collectives a step makes follows from its plan alone. What a rank gets has equal
bits on all ranks: decisions taken from it (which experts a token goes to) are the same everywhere.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from deltaserve.layout.shard import Shard


class CollectiveError(RuntimeError):
    """A rank did not take part in time, or is gone. The ranks are out of step for good: the worker ends."""


class Collective(Protocol):
    """One rank's end. Called from one thread; every rank makes the same calls in the same order."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; `x` may be overwritten. Raises CollectiveError."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., size * n], in the order of ranks. Raises CollectiveError."""
        ...


class Alone:
    """The only rank."""

    shard = Shard()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


@dataclass(slots=True)
class _Table:
    """Where the threads of a group meet."""

    barrier: threading.Barrier
    timeout_s: float
    parts: list[Tensor] = field(default_factory=list)
    """What each rank has put down, by rank."""

    def meet(self) -> None:
        try:
            self.barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise CollectiveError(f"a rank did not come within {self.timeout_s:g} s, or has failed") from None


class ThreadCollective:
    """A rank that is a thread of this process."""

    def __init__(self, shard: Shard, table: _Table) -> None:
        self._shard = shard
        self._table = table

    @classmethod
    def group(cls, size: int, timeout_s: float) -> tuple["ThreadCollective", ...]:
        """One for each rank."""
        table = _Table(threading.Barrier(size), timeout_s, [torch.empty(0)] * size)
        return tuple(cls(Shard(rank, size), table) for rank in range(size))

    @property
    def shard(self) -> Shard:
        return self._shard

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._together(x, _sum)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._together(x, lambda parts: torch.cat(parts, -1))

    def leave(self) -> None:
        """This rank takes part no more: the others hear of it at once instead of after the time limit."""
        self._table.barrier.abort()

    def _together(self, x: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Every rank computes the same from the same parts."""
        table = self._table
        table.parts[self._shard.rank] = x
        table.meet()
        out = combine(table.parts)
        table.meet()  # from here on each may overwrite its part
        return out


def _sum(parts: list[Tensor]) -> Tensor:
    """In the order of ranks."""
    out = parts[0] + parts[1] if len(parts) > 1 else parts[0]
    for part in parts[2:]:
        out += part
    return out


class GlooCollective:
    """A rank that is a process of this machine. What a GPU has computed goes through the memory of the host."""

    def __init__(self, shard: Shard, group: ProcessGroupGloo) -> None:
        self._shard = shard
        self._group: Any = group

    @classmethod
    def join(cls, shard: Shard, meeting_point: Path, timeout_s: float) -> "GlooCollective":
        """Returns when all ranks are there. `meeting_point`: a file that no group has used before, in a folder that
        only this user may enter. `timeout_s`: of this and of every collective. Raises CollectiveError."""
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # never what the host's name means
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        try:
            store: Any = FileStore(str(meeting_point), shard.size)
            store.set_timeout(options._timeout)
            return cls(shard, ProcessGroupGloo(store, shard.rank, shard.size, options))
        except RuntimeError as error:
            raise _failed(error) from None

    @property
    def shard(self) -> Shard:
        return self._shard

    def all_reduce(self, x: Tensor) -> Tensor:
        sums = x.cpu().contiguous()
        try:
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise _failed(error) from None
        return sums.to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        own = x.cpu().contiguous()
        parts = own.new_empty((self._shard.size * own.shape[0], *own.shape[1:]))
        try:
            self._group._allgather_base(parts, own).wait()
        except RuntimeError as error:
            raise _failed(error) from None
        return torch.cat(parts.chunk(self._shard.size), -1).to(x.device)


def _failed(error: RuntimeError) -> CollectiveError:
    return CollectiveError("ranks: " + " ".join(str(error).split())[:200])
