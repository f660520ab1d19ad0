"""Members of an expert group: workers that compute their own requests, and together the experts of all of them.

Each member holds a range of the experts. At every layer of experts it sends each token to the members that hold some of
that token's experts, computes what it was sent, and gets back one row for each token and expert, which it adds up
itself, in the order in which the token chose them (`compute/layers/moe.py`). So what the others do changes nothing of a
member's results but how many rows the product of an expert has.

The exchanges of a step are collective. A **round** is a step of all members: one with nothing to compute takes part
with no rows. Messages are the only signal: the first one of a round tells an idle member that it has begun.
"""

import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from deltaserve.compute.collective.collective import ALONE, Collective
from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.rank_mesh import NUM_TURNS, SLOT_BYTES, close_all, limit_waits, meet
from deltaserve.core.layout.shard import Shard

_WORD = 8
_NO_LIMIT_S = 0.0
"""Limit that the kernel takes as none."""


class ExpertGroup(ABC):
    """One member's end: exchanges, whether a round has begun, who is done, and who has ended.

    Called from one thread; every member makes the same calls in the same order.
    """

    done_word: ClassVar[bytes]
    """What a member says when it computes nothing more of its own."""
    peek_bytes: ClassVar[int]
    """How much is looked at to tell that word from the beginning of an exchange."""

    def __init__(self, member: Shard, others: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`others`: connections to the other members. `timeout_s`: of every exchange."""
        self._member = member
        self._others = dict(sorted(others.items()))
        self._number = 0
        self._timeout_s = timeout_s
        self._done: set[int] = set()
        """Members that have said so."""
        self._is_done = False
        weakref.finalize(self, close_all, list(self._others.values()))

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Rows for each member, [n, W] of any n and of one dtype and W -> rows from each member. What a member sends
        itself is not copied.

        Raises CollectiveError.
        """

    @abstractmethod
    def _limit(self, timeout_s: float | None) -> None:
        """Limit every exchange; None: not at all."""

    @abstractmethod
    def _tell_done(self) -> None:
        """Say `done_word` to all others. Raises CollectiveError."""

    @property
    def member(self) -> Shard:
        return self._member

    @property
    def sockets(self) -> Iterable[socket.socket]:
        """Readable when something is to be seen by `has_begun`."""
        return self._others.values()

    @property
    def is_over(self) -> bool:
        """Whether every member, this one too, has said that it is done."""
        return self._is_done and self._done == self._others.keys()

    def wait_for_all(self) -> None:
        """Wait until every member calls it, too, however long that takes: they load. Raises CollectiveError."""
        self._limit(None)
        self.all_to_all([torch.empty((0, 1))] * self._member.size)
        self._limit(self._timeout_s)

    def say_done(self) -> None:
        """Tell that this member computes nothing more of its own. It takes part as long as others do. Raises
        CollectiveError."""
        self._is_done = True
        self._tell_done()

    def has_begun(self) -> bool:
        """Whether another member is in a round that this one has not joined. Never waits. Raises CollectiveError when
        one has ended before all were done."""
        begun = [self._has_sent(rank, other) for rank, other in self._others.items()]
        return any(begun)

    def _has_sent(self, rank: int, other: socket.socket) -> bool:
        """Something of an exchange."""
        while True:
            try:
                message = other.recv(self.peek_bytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                message = b""
            if message == self.done_word:
                other.recv(len(message))
                self._done.add(rank)
                continue
            if not message and not self.is_over:
                raise gone(rank)
            return bool(message)


@dataclass(frozen=True, slots=True)
class Partners:
    """Who computes with a rank: the other ranks of its worker, and the other members of its expert group."""

    collective: Collective = ALONE
    group: ExpertGroup | None = None
    """Group of workers of one rank, each with the experts that its ModelSpec says; None: it is in none."""


class ExpertMesh(ExpertGroup):
    """A member on this machine: sockets say what lies in memory that all members have mapped (see RankMesh)."""

    done_word = b"done"
    peek_bytes = 4096

    def __init__(self, member: Shard, others: Sequence[socket.socket], memory: Tensor, timeout_s: float) -> None:
        """`others`: to the other members, in their order. `memory` [2, members, SLOT_BYTES] uint8. `timeout_s`: of
        every exchange."""
        ranks = [rank for rank in range(member.size) if rank != member.rank]
        super().__init__(member, dict(zip(ranks, others, strict=True)), timeout_s)
        self._limit(timeout_s)
        self._memory = memory

    @classmethod
    def join(cls, member: Shard, meeting_point: Path, timeout_s: float) -> "ExpertMesh":
        """Returns when all members are there. `meeting_point`: a path in a folder that only this user may enter; a
        group that used it before has ended. `timeout_s`: of this and of every exchange. Raises CollectiveError."""
        Path(f"{meeting_point}.{member.rank}").unlink(missing_ok=True)
        return cls(member, *meet(member, meeting_point, timeout_s), timeout_s)

    def _limit(self, timeout_s: float | None) -> None:
        limit_waits(self._others.values(), _NO_LIMIT_S if timeout_s is None else timeout_s)

    def _tell_done(self) -> None:
        for rank, other in self._others.items():
            self._send(rank, other, self.done_word)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        me = self._member.rank
        own, (_, *shape) = parts[me], parts[me].shape
        sent = [torch.empty(0, dtype=torch.uint8) if rank == me else bytes_of(part) for rank, part in enumerate(parts)]
        found = self._carry(torch.cat(sent), [len(part) for part in sent])
        device, dtype = own.device, own.dtype
        return [own if rank == me else part.view(dtype).view(-1, *shape).to(device) for rank, part in enumerate(found)]

    def _carry(self, stream: Tensor, lens: Sequence[int]) -> list[Tensor]:
        """stream [bytes], `lens` of it for each member -> what each of them has sent here."""
        me, start = self._member.rank, 0
        all_lens = self._exchange(stream[:SLOT_BYTES], lens)
        longest = max(map(sum, all_lens))
        found = [torch.empty(of_sender[me], dtype=torch.uint8) for of_sender in all_lens]
        while True:
            for rank, of_sender in enumerate(all_lens):
                _copy_part(self._slot(rank), start, sum(of_sender[:me]), found[rank])
            start += SLOT_BYTES
            if start >= longest:
                return found
            self._exchange(stream[start : start + SLOT_BYTES], lens)

    def _slot(self, rank: int) -> Tensor:
        """Bytes of a rank in the last exchange: [SLOT_BYTES] uint8."""
        return self._memory[self._number % NUM_TURNS, rank]

    def _exchange(self, piece: Tensor, lens: Sequence[int]) -> list[list[int]]:
        """piece [at most SLOT_BYTES] uint8 -> the `lens` of each member. See RankMesh.exchange for the turns."""
        self._number += 1
        self._slot(self._member.rank)[: len(piece)] = piece
        said = b"".join(number.to_bytes(_WORD, "little") for number in (self._number, *lens))
        for rank, other in self._others.items():
            self._send(rank, other, said)
        heard = {rank: self._hear(rank, other, len(said)) for rank, other in self._others.items()}
        return [heard.get(rank, list(lens)) for rank in range(self._member.size)]

    def _send(self, rank: int, other: socket.socket, message: bytes) -> None:
        try:
            other.send(message)
        except BlockingIOError:
            raise late(rank) from None
        except OSError:
            raise gone(rank) from None

    def _hear(self, rank: int, other: socket.socket, length: int) -> list[int]:
        try:
            while (message := other.recv(length)) == self.done_word:
                self._done.add(rank)
        except BlockingIOError:
            raise late(rank) from None
        except OSError:
            message = b""
        if not message:
            raise gone(rank)
        number, *lens = (int.from_bytes(message[at : at + _WORD], "little") for at in range(0, len(message), _WORD))
        if len(message) != length or number != self._number:
            raise disagrees(rank)
        return lens


def bytes_of(part: Tensor) -> Tensor:
    """The part's bytes on the CPU: [any] uint8."""
    return part.cpu().contiguous().view(-1).view(torch.uint8)


def _copy_part(slot: Tensor, start: int, begin: int, target: Tensor) -> None:
    """`slot` has bytes [start, start + SLOT_BYTES) of a stream whose part that begins at `begin` is the target's."""
    first, end = max(start, begin), min(start + SLOT_BYTES, begin + len(target))
    if first < end:
        target[first - begin : end - begin] = slot[first - start : end - start]


def gone(rank: int) -> CollectiveError:
    return CollectiveError(f"member {rank} of the expert group has ended")


def late(rank: int) -> CollectiveError:
    return CollectiveError(f"member {rank} of the expert group did not come in time")


def disagrees(rank: int) -> CollectiveError:
    return CollectiveError(f"member {rank} of the expert group does not compute the same layers")
