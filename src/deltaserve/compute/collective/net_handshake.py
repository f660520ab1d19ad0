"""How two ranks on different machines prove to each other that they belong to one start.

    the rank that dials                     the rank that listens
    hello: nonce, rank, size, listener  ->
                                        <-  hello: nonce, rank, size, listener
    proof                               ->  checked; then, whether that rank is waited for
                                        <-  proof: accepted

A proof is an HMAC over both hellos and the role of who gives it, so none is of use on another connection or the other
way round. Whoever connects and does not hold the key is told one hello; at most a hello and a proof are read of it.
"""

import errno
import hmac
import math
import os
import select
import socket
import struct
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from deltaserve.compute.collective.collective_error import CollectiveError
from deltaserve.compute.collective.rank_mesh import close_all
from deltaserve.core.layout.shard import Shard

Address = tuple[str, int]
"""IPv4 address or name, and port."""
ADDRESS = struct.Struct("<4sH")
_HELLO = struct.Struct(f"<4s32sII{ADDRESS.size}s")
_MAGIC = b"DSR1"
_NONCE_BYTES = 32
_DIGEST = "sha256"
_PROOF_BYTES = 32
_DIALS, _LISTENS = b"deltaserve rank that dials", b"deltaserve rank that listens"
PROOF_LIMIT_S = 5.0
"""From an accepted connection to its proof. Ranks are programs: they need milliseconds."""
MAX_CANDIDATES = 64
"""Connections that have proved nothing yet; further ones wait until one of these has ended."""
_DIAL_EVERY_S = 0.05
_OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EBADF, errno.EINVAL)
"""What accept fails with because of this process, not because of who connects: it would fail again at once."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """What a rank says of itself, and proves."""

    shard: Shard
    address: Address
    """Where it listens, in numbers."""
    key: bytes = field(repr=False)

    def hello(self) -> bytes:
        """Another one for each connection."""
        return _HELLO.pack(
            _MAGIC, os.urandom(_NONCE_BYTES), self.shard.rank, self.shard.size, pack_address(self.address)
        )

    def proof(self, role: bytes, dialled: bytes, listening: bytes) -> bytes:
        """`dialled`, `listening`: the hellos of both."""
        return hmac.digest(self.key, role + dialled + listening, _DIGEST)


@dataclass(frozen=True, slots=True)
class _Hello:
    """What the other one says of itself."""

    shard: Shard
    address: Address

    @classmethod
    def read(cls, data: bytes) -> "_Hello":
        """Raises ConnectionError when no rank wrote it."""
        magic, _, rank, size, address = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise ConnectionError("one that is no rank")
        return cls(Shard(rank, size), unpack_address(address))


def pack_address(address: Address) -> bytes:
    return ADDRESS.pack(socket.inet_aton(address[0]), address[1])


def unpack_address(data: bytes) -> Address:
    host, port = ADDRESS.unpack(data)
    return socket.inet_ntoa(host), port


def left_s(deadline: float) -> float:
    """Raises TimeoutError when nothing is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left


def receive_exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(left_s(deadline))
        received = connection.recv(num_bytes - len(data))
        if not received:
            raise ConnectionError("the connection has ended")
        data += received
    return data


# ---------------------------------------------------------------- the rank that dials


def dial(own: RankIdentity, rank: int, address: Address, deadline: float) -> socket.socket:
    """Connection to a rank that has proved itself and has accepted this one.

    Tries until that rank listens. Raises TimeoutError, and CollectiveError when it is another one, or refuses.
    """
    said = own.hello()
    with ExitStack() as on_error:
        connection, heard = _greet(said, rank, address, deadline)
        on_error.callback(connection.close)
        try:
            listening = _Hello.read(heard).shard
            if listening.rank != rank:
                raise CollectiveError(f"ranks: what listens as rank {rank} is rank {listening.rank}")
            connection.sendall(own.proof(_DIALS, said, heard))
            proof = receive_exactly(connection, _PROOF_BYTES, deadline)
        except TimeoutError:
            raise TimeoutError(f"rank {rank} is missing: it is there, and does not answer") from None
        except OSError:
            raise CollectiveError(f"ranks: {_refusal(own.shard, rank, heard)}") from None
        if not hmac.compare_digest(proof, own.proof(_LISTENS, said, heard)):
            raise CollectiveError(f"ranks: what listens as rank {rank} does not hold the key")
        on_error.pop_all()
    return connection


def _greet(said: bytes, rank: int, address: Address, deadline: float) -> tuple[socket.socket, bytes]:
    """Connection to whatever listens there, and its hello. It has until the deadline: it may not accept yet."""
    why = "it does not answer"
    while True:
        with ExitStack() as on_error:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            on_error.callback(connection.close)
            try:
                connection.settimeout(left_s(deadline))
                connection.connect(address)
                connection.sendall(said)
                heard = receive_exactly(connection, _HELLO.size, deadline)
                on_error.pop_all()
                return connection, heard
            except TimeoutError:  # the kernel may give up earlier
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"rank {rank} is missing: {why}") from None
            except OSError as error:
                why = error.strerror or str(error)
        time.sleep(_DIAL_EVERY_S)


def _refusal(own: Shard, rank: int, heard: bytes) -> str:
    """Why a rank that said `heard` has ended the connection, as far as can be known."""
    try:
        size = _Hello.read(heard).shard.size
    except ConnectionError:
        return f"what listens as rank {rank} is no rank"
    if size != own.size:
        return f"rank {rank} is one of {size} ranks, rank {own.rank} one of {own.size}"
    return f"rank {rank} refuses rank {own.rank}: it holds another key, or has a rank {own.rank} already"


# ---------------------------------------------------------------- the rank that listens


class _Candidate:
    """A connection that was accepted and has proved nothing yet."""

    def __init__(self, connection: socket.socket, said: bytes, until: float) -> None:
        self.connection = connection
        self.said = said
        self.heard = b""
        self.until = until

    def hear(self) -> None:
        """Read what has come, no further than the next answer. Raises OSError when there is an end."""
        end = _HELLO.size if len(self.heard) < _HELLO.size else _HELLO.size + _PROOF_BYTES
        data = self.connection.recv(end - len(self.heard))
        if not data:
            raise ConnectionError("one that has ended the connection")
        self.heard += data


class RankAdmission:
    """Accepts ranks. Others that connect neither end it nor hold it up: all are heard at once."""

    def __init__(self, own: RankIdentity, listener: socket.socket, deadline: float) -> None:
        self._own = own
        self._listener = listener
        self._deadline = deadline
        self._candidates: dict[int, _Candidate] = {}
        """By descriptor, in order of arrival."""
        self._remark = ""
        """Who was refused or left last."""
        self.met: dict[int, socket.socket] = {}
        """Connections to other ranks; those that were dialled are put there, too. Their ends are seen meanwhile."""
        self.addresses: dict[int, Address] = {}
        """Where those that were accepted listen."""

    def admit(self, ranks: Sequence[int]) -> None:
        """Returns when all of them are in `met`. Raises TimeoutError, which names those that are missing, and
        ConnectionError when another one has ended."""
        self._listener.setblocking(False)
        try:
            while missing := [rank for rank in ranks if rank not in self.met]:
                if time.monotonic() >= self._deadline:
                    raise TimeoutError(f"{_missing(missing)}{self._remark}")
                self._go_on(missing)
        finally:
            close_all(candidate.connection for candidate in self._candidates.values())

    def _go_on(self, missing: Container[int]) -> None:
        """Wait for whatever comes first."""
        poll = select.poll()
        for descriptor in self._candidates:
            poll.register(descriptor, select.POLLIN)
        if len(self._candidates) < MAX_CANDIDATES:
            poll.register(self._listener, select.POLLIN)
        ranks = {connection.fileno(): rank for rank, connection in self.met.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # what it sends is for later
        until = min([self._deadline, *(candidate.until for candidate in self._candidates.values())])
        for descriptor, _ in poll.poll(max(0, math.ceil((until - time.monotonic()) * 1000))):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in ranks:
                self._miss(ranks[descriptor])
            else:
                self._hear(descriptor, missing)
        now = time.monotonic()
        for descriptor, candidate in list(self._candidates.items()):
            if candidate.until <= now:
                self._refuse(descriptor, "one that proved nothing in time")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OWN_ERRORS:
                raise
            return  # gone again
        connection.setblocking(False)
        until = min(self._deadline, time.monotonic() + PROOF_LIMIT_S)
        self._candidates[connection.fileno()] = _Candidate(connection, self._own.hello(), until)

    def _hear(self, descriptor: int, missing: Container[int]) -> None:
        candidate = self._candidates[descriptor]
        try:
            candidate.hear()
            if len(candidate.heard) == _HELLO.size:
                _Hello.read(candidate.heard)
                candidate.connection.sendall(candidate.said)  # never waits: whoever leaves no room is refused
            elif len(candidate.heard) == _HELLO.size + _PROOF_BYTES:
                self._admit(candidate, missing)
                del self._candidates[descriptor]
        except OSError as error:
            self._refuse(descriptor, error.strerror or str(error))

    def _admit(self, candidate: _Candidate, missing: Container[int]) -> None:
        """Raises ConnectionError with who is refused."""
        heard, proof = candidate.heard[: _HELLO.size], candidate.heard[_HELLO.size :]
        if not hmac.compare_digest(proof, self._own.proof(_DIALS, heard, candidate.said)):
            raise ConnectionError("one that does not hold the key")
        hello = _Hello.read(heard)
        rank, size = hello.shard.rank, hello.shard.size
        if size != self._own.shard.size:
            raise ConnectionError(f"one of {size} ranks")
        if rank not in missing or rank in self.met:
            raise ConnectionError(f"rank {rank}, which is there already or has no business here")
        candidate.connection.sendall(self._own.proof(_LISTENS, heard, candidate.said))
        self.met[rank] = candidate.connection
        self.addresses[rank] = hello.address

    def _miss(self, rank: int) -> None:
        """A rank has ended. As long as rank 0 has not told where it listens, it may come again."""
        if self._own.shard.rank > 0:
            raise ConnectionError(f"rank {rank} has ended")
        self.met.pop(rank).close()
        self._remark = f"; rank {rank} came and left"

    def _refuse(self, descriptor: int, who: str) -> None:
        self._candidates.pop(descriptor).connection.close()
        self._remark = f"; refused last: {who}"


def _missing(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is missing" if len(ranks) == 1 else f"ranks {names} are missing"
