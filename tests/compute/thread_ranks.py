"""Ranks, and members of an expert group, that are threads of this process."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.expert_group import ExpertMesh
from deltaserve.compute.collective.net_experts import NetExpertMesh
from deltaserve.compute.collective.rank_mesh import NUM_TURNS, SLOT_BYTES
from deltaserve.core.layout.shard import Shard


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
        """Collectives of all ranks, one for each."""
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
        """Take part no more: the other ranks hear of it at once instead of after the time limit."""
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
    """Sum of the parts, added in the order of ranks."""
    out = parts[0] + parts[1] if len(parts) > 1 else parts[0]
    for part in parts[2:]:
        out += part
    return out


def expert_members(size: int, timeout_s: float) -> list[ExpertMesh]:
    """Members over memory that all have."""
    memory = torch.zeros((NUM_TURNS, size, SLOT_BYTES), dtype=torch.uint8)
    ends = _joined_pairs(size, socket.SOCK_SEQPACKET)
    return [ExpertMesh(member, [*others.values()], memory, timeout_s) for member, others in ends.items()]


def net_expert_members(size: int, timeout_s: float) -> list[NetExpertMesh]:
    """Members over streams, as those of TCP."""
    ends = _joined_pairs(size, socket.SOCK_STREAM)
    for others in ends.values():
        for other in others.values():
            other.setblocking(False)
    return [NetExpertMesh(member, others, timeout_s) for member, others in ends.items()]


def _joined_pairs(size: int, kind: socket.SocketKind) -> dict[Shard, dict[int, socket.socket]]:
    """Connections of members that are threads of this process: member |-> those to each other one, in their order."""
    members = [Shard(rank, size) for rank in range(size)]
    ends: dict[Shard, dict[int, socket.socket]] = {member: {} for member in members}
    for one in members:
        for other in members[: one.rank]:
            ends[one][other.rank], ends[other][one.rank] = socket.socketpair(socket.AF_UNIX, kind)
    return {member: dict(sorted(others.items())) for member, others in ends.items()}
