"""How the ranks of a worker add up and put together what each has computed.

Ranks compute the same steps; which collectives a step makes follows from its plan alone. What a rank gets has equal
bits on all ranks: decisions taken from it (which experts a token goes to) are the same everywhere.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.compute.collective.net_mesh import NetMesh
from deltaserve.compute.collective.rank_mesh import SLOT_BYTES, RankMesh
from deltaserve.core.layout.shard import Shard


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
    """The collective of a worker with one rank."""

    shard = Shard()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


class Mesh(Protocol):
    """How a rank that is a process exchanges bytes with the others: RankMesh, NetMesh."""

    @property
    def shard(self) -> Shard: ...

    def exchange(self, part: Tensor) -> Tensor:
        """part [n] uint8, at most SLOT_BYTES -> [ranks, n], valid until the next exchange. Raises CollectiveError."""
        ...


class ProcessCollective:
    """A rank that is a process. What a GPU has computed goes through the memory of the host."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @classmethod
    def join(cls, shard: Shard, meeting_point: Path, timeout_s: float) -> "ProcessCollective":
        """Meet the other ranks, all on this machine: see RankMesh.join."""
        return cls(RankMesh.join(shard, meeting_point, timeout_s))

    @classmethod
    def join_over(
        cls, shard: Shard, meeting: NetMeeting, timeout_s: float, listener: socket.socket | None = None
    ) -> "ProcessCollective":
        """Meet the other ranks, on several machines: see NetMesh.join."""
        return cls(NetMesh.join(shard, meeting, timeout_s, listener))

    @property
    def shard(self) -> Shard:
        return self._mesh.shard

    def all_reduce(self, x: Tensor) -> Tensor:
        own = x.cpu().contiguous()
        flat = own.view(-1)
        sums = torch.empty_like(flat)
        for piece, parts in self._exchange(flat):
            torch.add(parts[0], parts[1], out=sums[piece])
            for part in parts[2:]:
                sums[piece] += part
        return sums.view(own.shape).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        own = x.cpu().contiguous()
        flat = own.view(-1)
        gathered = flat.new_empty((self.shard.size, flat.numel()))
        for piece, parts in self._exchange(flat):
            gathered[:, piece] = parts
        return torch.cat(gathered.view(len(gathered), *own.shape).unbind(), -1).to(x.device)

    def _exchange(self, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """flat [n] -> for each piece of it, what the ranks have there, [ranks, n']; to be read before the next one."""
        length = SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), length):
            piece = slice(start, min(start + length, flat.numel()))
            yield piece, self._mesh.exchange(flat[piece].view(torch.uint8)).view(flat.dtype)
