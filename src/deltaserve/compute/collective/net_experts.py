"""Members of an expert group on several machines: a TCP connection between each two of them.

Each member sends each other one the rows that are for it, behind a header that says how many; see expert_group.py for
the rounds. They meet as ranks do (net_mesh.py), by a key that all members have, and what they say then is neither
encrypted nor authenticated either.
"""

import math
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltaserve.compute.collective.expert_group import MemberLinks, bytes_of, disagrees, gone, joined_pairs, late
from deltaserve.compute.collective.net_meeting import NetMeeting
from deltaserve.compute.collective.net_mesh import meet_over
from deltaserve.core.layout.shard import Shard

_HEADER = struct.Struct("<QQ")
"""Number of the exchange, and bytes that follow."""
_DONE = _HEADER.pack((1 << 64) - 1, 0)
"""In place of a header: this member computes nothing more of its own."""
_NOTHING = memoryview(b"")


class NetExpertMesh(MemberLinks):
    """One member's end: an ExpertGroup. For one thread."""

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

    @classmethod
    def group(cls, size: int, timeout_s: float) -> tuple["NetExpertMesh", ...]:
        """Members that are threads of this process."""
        ends = joined_pairs(size, socket.SOCK_STREAM)
        for others in ends.values():
            for other in others.values():
                other.setblocking(False)
        return tuple(cls(member, others, timeout_s) for member, others in ends.items())

    def _limit(self, timeout_s: float | None) -> None:
        self._limit_s = timeout_s

    def _tell_done(self) -> None:
        self._carry({rank: _MemberTraffic(rank, other, _DONE, None) for rank, other in self._others.items()})

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See ExpertGroup. What a member sends itself is not copied."""
        me = self._member.rank
        own, (_, *shape) = parts[me], parts[me].shape
        row_bytes = math.prod(shape) * own.element_size()
        self._number += 1
        exchanges = {}
        for rank, other in self._others.items():
            sent = bytes_of(parts[rank])
            said = _HEADER.pack(self._number, len(sent))
            exchanges[rank] = _MemberTraffic(
                rank, other, said, _IncomingRows(self._number, row_bytes), sent.numpy().data
            )
        self._carry(exchanges)
        found = {rank: one.part.rows.view(own.dtype).view(-1, *shape) for rank, one in exchanges.items() if one.part}
        return [own if rank == me else found[rank].to(own.device) for rank in range(self._member.size)]

    def _carry(self, exchanges: Mapping[int, "_MemberTraffic"]) -> None:
        """Complete all of them, in both directions at once. Raises CollectiveError."""
        deadline = None if self._limit_s is None else time.monotonic() + self._limit_s
        pending = {one.descriptor: one for one in exchanges.values()}
        poll = select.poll()
        for descriptor, one in pending.items():
            one.send()
            poll.register(descriptor, one.events)
        while pending := {descriptor: one for descriptor, one in pending.items() if one.events}:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise late(next(iter(pending.values())).rank)
            for descriptor, events in poll.poll(None if left is None else math.ceil(left * 1000)):
                one = pending[descriptor]
                if events & ~select.POLLOUT and one.receive():
                    self._done.add(one.rank)
                if events & select.POLLOUT:
                    one.send()
                if one.events:
                    poll.modify(descriptor, one.events)
                else:  # what it sends next is for the next exchange
                    poll.unregister(descriptor)


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
        self, rank: int, other: socket.socket, said: bytes, part: _IncomingRows | None, rows: memoryview = _NOTHING
    ) -> None:
        """`part`: what is to come; None: nothing is waited for."""
        self.rank = rank
        self.part = part
        self._other = other
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
            num_bytes = self._other.sendmsg(self._unsent) if self._unsent else 0
        except BlockingIOError:
            return
        except OSError:
            raise gone(self.rank) from None
        while self._unsent and num_bytes >= len(self._unsent[0]):
            num_bytes -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][num_bytes:]

    def receive(self) -> bool:
        """As much as is there, and nothing of the next exchange. Whether the other one said that it is done. Raises
        CollectiveError."""
        try:
            if self._header is not None:
                return self._hear_header(self._header)
            num_bytes = self._other.recv_into(self._unheard)
        except BlockingIOError:
            return False
        except OSError:
            num_bytes = 0
        if not num_bytes:
            raise gone(self.rank)
        self._unheard = self._unheard[num_bytes:]
        return False

    def _hear_header(self, header: bytearray) -> bool:
        data = self._other.recv(_HEADER.size - len(header))
        if not data or self.part is None:
            raise gone(self.rank)
        header += data
        if header == _DONE:
            header.clear()
            return True
        if len(header) == _HEADER.size:
            begun = self.part.begin(bytes(header))
            if begun is None:
                raise disagrees(self.rank)
            self._header, self._unheard = None, begun
        return False
