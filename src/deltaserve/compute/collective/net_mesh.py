"""How ranks on several machines meet, and exchange what they have: a TCP connection between each two of them.

Every rank listens on an address of its own machine. Rank 0 is known to all; it tells them where the others are once it
has accepted each. All connections begin with the handshake of `net_handshake.py`: it keeps strangers, and ranks of an
earlier start, out. After it bytes are neither encrypted nor authenticated, as those of page transfers are not: the data
network is trusted, and whoever can change what it carries can change what the ranks compute.
"""

import math
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.net_handshake import (
    ADDRESS,
    Address,
    RankAdmission,
    RankIdentity,
    dial,
    left_s,
    pack_address,
    receive_exactly,
    unpack_address,
)
from deltaserve.compute.collective.net_meeting import NetMeeting, listen_at
from deltaserve.compute.collective.rank_mesh import NUM_TURNS, SLOT_BYTES, close_all
from deltaserve.core.layout.shard import Shard

_HEADER = struct.Struct("<QQ")
"""Number of the exchange, and its bytes."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A machine that vanished between two exchanges is seen after 25 s; within one the limit of the exchange holds."""


class NetMesh:
    """One rank's end. For one thread."""

    def __init__(self, shard: Shard, others: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`others`: connections to the other ranks. `timeout_s`: of every exchange."""
        self.shard = shard
        self._others = dict(sorted(others.items()))
        self._limit_s = timeout_s
        self._number = 0
        self._memory = torch.empty((NUM_TURNS, shard.size, SLOT_BYTES), dtype=torch.uint8)
        self._slots = [[memoryview(slot.numpy()) for slot in turn] for turn in self._memory]
        self._close = weakref.finalize(self, close_all, list(self._others.values()))

    @classmethod
    def join(
        cls, shard: Shard, meeting: NetMeeting, timeout_s: float, listener: socket.socket | None = None
    ) -> "NetMesh":
        """Returns when all ranks are there. `timeout_s`: of this and of every exchange. `listener`: where this rank
        listens (see net_meeting.py), closed in any case; None: it opens one, and that of rank 0 is where the meeting
        says. Raises CollectiveError, which names the ranks that were missing."""
        return cls(shard, meet_over(shard, meeting, timeout_s, listener), timeout_s)

    def limit(self, timeout_s: float) -> None:
        """Limit every exchange."""
        self._limit_s = timeout_s

    def exchange(self, part: Tensor) -> Tensor:
        """part [n] uint8, at most SLOT_BYTES -> [ranks, n], valid until the next exchange. Raises CollectiveError, and
        closes all connections then: in the middle of a part nobody could find the next header.

        There are two turns of memory: `part` may be made of what the last exchange gave.
        """
        turn, num_bytes = self._number % NUM_TURNS, part.numel()
        slots = self._memory[turn, :, :num_bytes]
        slots[self.shard.rank] = part
        self._number += 1
        said = _HEADER.pack(self._number, num_bytes)
        views = [slot[:num_bytes] for slot in self._slots[turn]]
        own = views[self.shard.rank]
        exchanges = [_Exchange(other, said, own, views[rank]) for rank, other in self._others.items()]
        try:
            if carry(exchanges, self._limit_s) is not None:
                raise CollectiveError("ranks: one did not come in time")
        except CollectiveError:
            self._close()
            raise
        except OSError as error:
            self._close()
            raise CollectiveError(f"ranks: one is gone: {error.strerror or error}") from None
        return slots


# ---------------------------------------------------------------- an exchange


class RankTraffic(Protocol):
    """What is still to be sent to another rank, and received of it, by a connection that does not block."""

    @property
    def descriptor(self) -> int: ...

    @property
    def events(self) -> int:
        """What it waits for; 0: it is complete."""
        ...

    def send(self) -> None:
        """As much as goes at once."""
        ...

    def receive(self) -> None:
        """As much as is there, and nothing of the next exchange."""
        ...


SomeTraffic = TypeVar("SomeTraffic", bound=RankTraffic)


class _Exchange:
    """What one exchange still has to send to another rank, and to receive of it."""

    def __init__(self, other: socket.socket, said: bytes, part: memoryview, slot: memoryview) -> None:
        """`said`: the header, which must be the same on both sides."""
        self._other = other
        self._said = said
        self._unsent = [memoryview(said), part]
        self._heard = bytearray(len(said))
        self._unheard = [memoryview(self._heard), slot]

    @property
    def descriptor(self) -> int:
        return self._other.fileno()

    @property
    def events(self) -> int:
        return (select.POLLIN if self._unheard else 0) | (select.POLLOUT if self._unsent else 0)

    def send(self) -> None:
        """As much as goes at once. Raises OSError."""
        try:
            self._unsent = rest(self._unsent, self._other.sendmsg(self._unsent))
        except BlockingIOError:
            return

    def receive(self) -> None:
        """As much as is there, and nothing of the next exchange. Raises OSError, and CollectiveError when the other one
        computes something else."""
        try:
            num_bytes, *_ = self._other.recvmsg_into(self._unheard)
        except BlockingIOError:
            return
        if not num_bytes:
            raise ConnectionError("the connection has ended")
        self._unheard = rest(self._unheard, num_bytes)
        if len(self._unheard) < 2 and self._heard != self._said:
            raise CollectiveError("ranks: they do not compute the same")


def carry(exchanges: Iterable[SomeTraffic], limit_s: float | None) -> SomeTraffic | None:
    """Complete all of them, in both directions at once; raises what they raise. Returns one that did not come in time;
    None: all have. `limit_s` None: however long it takes."""
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    poll = select.poll()
    pending = {}
    for exchange in exchanges:
        exchange.send()
        if exchange.events:
            pending[exchange.descriptor] = exchange
            poll.register(exchange.descriptor, exchange.events)
    while pending:
        left = deadline - time.monotonic()
        if left <= 0:
            return next(iter(pending.values()))
        for descriptor, events in poll.poll(None if limit_s is None else math.ceil(left * 1000)):
            exchange = pending[descriptor]
            if events & ~select.POLLOUT:  # an end of the connection, too, is seen by receiving
                exchange.receive()
            if events & select.POLLOUT:
                exchange.send()
            if exchange.events:
                poll.modify(descriptor, exchange.events)
            else:  # what it sends next is for the next exchange, and must not wake this one
                poll.unregister(descriptor)
                del pending[descriptor]
    return None


def rest(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The buffers without their first bytes; none that is empty at the front."""
    for at, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[at + 1 :]]
        num_bytes -= len(buffer)
    return []


# ---------------------------------------------------------------- the meeting


def meet_over(
    shard: Shard, meeting: NetMeeting, timeout_s: float, listener: socket.socket | None = None
) -> dict[int, socket.socket]:
    """Connections to all others, by rank: see NetMesh.join. Raises CollectiveError."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as on_error:
        try:
            if listener is None:
                listener = listen_at((meeting.host, meeting.port) if shard.rank == 0 else (meeting.own_host, 0))
            with listener:
                identity = RankIdentity(shard, listener.getsockname(), meeting.key)
                admission = RankAdmission(identity, listener, deadline)
                on_error.callback(lambda: close_all(admission.met.values()))
                if shard.rank == 0:
                    _gather(admission, identity, deadline)
                else:
                    _find(admission, identity, (meeting.host, meeting.port), deadline)
        except OSError as error:
            why = error.strerror or str(error)
            raise CollectiveError(f"ranks: not all of them met within {timeout_s:g} s: {why}") from None
        for other in admission.met.values():
            set_options(other)
        on_error.pop_all()
    return admission.met


def _gather(admission: RankAdmission, own: RankIdentity, deadline: float) -> None:
    """Rank 0: wait for all, then tell each where the others listen. Raises OSError."""
    admission.admit(range(1, own.shard.size))
    table = b"".join(pack_address(admission.addresses[rank]) for rank in range(1, own.shard.size))
    for rank, other in admission.met.items():
        try:
            other.settimeout(left_s(deadline))
            other.sendall(table)
        except OSError:
            raise ConnectionError(f"rank {rank} has ended, or was the last to come") from None


def _find(admission: RankAdmission, own: RankIdentity, first: Address, deadline: float) -> None:
    """Another rank: learn from rank 0 where the others are, dial those below and accept those above. Raises OSError,
    and CollectiveError when another one refuses this one."""
    rank, size = own.shard.rank, own.shard.size
    admission.met[0] = dial(own, 0, first, deadline)
    for below, address in list(enumerate(_learn(admission.met[0], size, deadline), 1))[: rank - 1]:
        admission.met[below] = dial(own, below, address, deadline)
    admission.admit(range(rank + 1, size))


def _learn(first: socket.socket, size: int, deadline: float) -> list[Address]:
    """Where ranks 1, 2, ... listen. Raises OSError."""
    try:
        table = receive_exactly(first, ADDRESS.size * (size - 1), deadline)
    except OSError:
        raise TimeoutError("rank 0 has not found all others") from None
    return [unpack_address(table[at : at + ADDRESS.size]) for at in range(0, len(table), ADDRESS.size)]


def set_options(connection: socket.socket) -> None:
    """Never wait for it; send at once; miss who is gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
