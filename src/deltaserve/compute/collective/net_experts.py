"""Members of an expert group on several machines: a TCP connection between each two of them.

Each member sends each other one the rows that are for it, behind a header that says how many; see expert_group.py for
the rounds. They meet as ranks do (net_mesh.py), by a key that all members have, and what they say then is neither
encrypted nor authenticated either.
"""

import math
import select
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup, bytes_of, disagrees, gone, late
from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.compute.collective.net_mesh import carry, meet_over, rest
from deltaserve.core.layout.shard import Shard

_HEADER = struct.Struct("<QQ")
"""Number of the exchange, and bytes that follow."""
_DONE = _HEADER.pack((1 << 64) - 1, 0)
"""In place of a header: this member computes nothing more of its own."""
_NOTHING = memoryview(b"")


class NetExpertMesh(ExpertGroup):
    """A member on a machine of its own, perhaps."""

    done_word = _DONE
    peek_bytes = _HEADER.size

    def __init__(self, member: Shard, others: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`others`: connections that do not block. `timeout_s`: of every exchange."""
        super().__init__(member, others, timeout_s)
        self._limit_s: float | None = timeout_s

    @classmethod
    def join(cls, member: Shard, meeting: NetMeeting, timeout_s: float) -> "NetExpertMesh":
        """Returns when all members are there. `meeting`: member 0 listens there. `timeout_s`: of this and of every
        exchange. Raises CollectiveError."""
        return cls(member, meet_over(member, meeting, timeout_s), timeout_s)

    def _limit(self, timeout_s: float | None) -> None:
        self._limit_s = timeout_s

    def _tell_done(self) -> None:
        self._carry(_MemberTraffic(rank, other, _DONE, self._done) for rank, other in self._others.items())

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        me = self._member.rank
        own, (_, *shape) = parts[me], parts[me].shape
        row_bytes = math.prod(shape) * own.element_size()
        self._number += 1
        exchanges = {}
        for rank, other in self._others.items():
            sent = bytes_of(parts[rank])
            said = _HEADER.pack(self._number, len(sent))
            part = _IncomingRows(self._number, row_bytes)
            exchanges[rank] = _MemberTraffic(rank, other, said, self._done, part, sent.numpy().data)
        self._carry(exchanges.values())
        found = {rank: one.part.rows.view(own.dtype).view(-1, *shape) for rank, one in exchanges.items() if one.part}
        return [own if rank == me else found[rank].to(own.device) for rank in range(self._member.size)]

    def _carry(self, exchanges: Iterable["_MemberTraffic"]) -> None:
        """Complete all of them. Raises CollectiveError."""
        missed = carry(exchanges, self._limit_s)
        if missed is not None:
            raise late(missed.rank)


class _IncomingRows:
    """What another member sends in one exchange."""

    def __init__(self, number: int, row_bytes: int) -> None:
        self._number = number
        self._row_bytes = row_bytes
        self.rows = torch.empty(0, dtype=torch.uint8)

    def begin(self, header: bytes) -> memoryview | None:
        """Where its rows go; None: the header is of another exchange."""
        number, num_bytes = _HEADER.unpack(header)
        if number != self._number or num_bytes % self._row_bytes:
            return None
        self.rows = torch.empty(num_bytes, dtype=torch.uint8)
        return self.rows.numpy().data


class _MemberTraffic:
    """What is still to be sent to another member, and received of it."""

    def __init__(
        self,
        rank: int,
        other: socket.socket,
        said: bytes,
        done: set[int],
        part: _IncomingRows | None = None,
        rows: memoryview = _NOTHING,
    ) -> None:
        """`done` learns of the other one when it says so. `part`: what is to come; None: nothing is waited for."""
        self.rank = rank
        self.part = part
        self._other = other
        self._done = done
        self._unsent = [view for view in (memoryview(said), rows) if len(view)]
        self._header = bytearray() if part is not None else None
        """What has come of a header; None: none is waited for."""
        self._unheard = _NOTHING

    @property
    def descriptor(self) -> int:
        return self._other.fileno()

    @property
    def events(self) -> int:
        """What it waits for; 0: it is complete."""
        waits = self._header is not None or len(self._unheard)
        return (select.POLLIN if waits else 0) | (select.POLLOUT if self._unsent else 0)

    def send(self) -> None:
        """As much as goes at once. Raises CollectiveError."""
        try:
            self._unsent = rest(self._unsent, self._other.sendmsg(self._unsent) if self._unsent else 0)
        except BlockingIOError:
            return
        except OSError:
            raise gone(self.rank) from None

    def receive(self) -> None:
        """As much as is there, and nothing of the next exchange. Raises CollectiveError."""
        try:
            if self._header is not None:
                self._hear_header(self._header)
                return
            num_bytes = self._other.recv_into(self._unheard)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            raise gone(self.rank)
        self._unheard = self._unheard[num_bytes:]

    def _hear_header(self, header: bytearray) -> None:
        data = self._other.recv(_HEADER.size - len(header))
        if not data or self.part is None:
            raise gone(self.rank)
        header += data
        if header == _DONE:
            header.clear()
            self._done.add(self.rank)
        elif len(header) == _HEADER.size:
            begun = self.part.begin(bytes(header))
            if begun is None:
                raise disagrees(self.rank)
            self._header, self._unheard = None, begun
