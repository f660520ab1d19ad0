"""Transport between processes of one machine: the reader copies from the writer's memory.

A write is a request: which bytes, where to, and what to say when they are there. The reader's own transfer thread
copies, so nobody else ever writes into its pages, and its fence is to stop copying. The writer's fence cannot stop the
reader; it makes the reader throw away what it has copied (`memory.py` has the argument).

Everybody here runs under one user and shares one private folder, in which each endpoint listens. Endpoints know each
other by tokens that the workers told each other over their links.
"""

import itertools
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import (
    Evidence,
    FenceResult,
    Notification,
    RemoteRank,
    RemoteRegion,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.core.transport_bounds import check_ranks, check_write, index_remote
from deltaserve.transports.local.frames import (
    MAX_COPIES,
    MAX_REGIONS,
    PACKET_BYTES,
    LocalCard,
    LocalHello,
    decode_card,
    decode_hello,
    encode_card,
    encode_write,
)
from deltaserve.transports.local.links import ReaderLink, WriterLink
from deltaserve.transports.local.memory import EpochWord, FarMemory, LocalRegions, machine_problem
from deltaserve.transports.local.memory_access import HostAccess, MemoryAccess

log = logging.getLogger(__name__)

_BACKLOG = 128
"""Ranks of a peer connect once each, and may all do so before we look."""
_CREDENTIALS = struct.Struct("iII")


def host_access(device: str) -> MemoryAccess:
    """The host's memory, and no other. Raises TransportError."""
    if device != "cpu":
        raise TransportError(f"it is memory of {device}, and pages of the host are moved here")
    return HostAccess()


class _FarRank(NamedTuple):
    """A rank of the peer: its endpoint, where we may write, and how."""

    token: int
    regions: dict[RegionId, RemoteRegion]
    link: WriterLink


class _Folder:
    """The folder of the sockets. Names go through its descriptor: a socket's path may have 107 bytes only."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"local transport: {path}: {error.strerror}") from None

    def path(self, name: str) -> str:
        return f"/proc/self/fd/{self._fd}/{name}"

    def close(self) -> None:
        os.close(self._fd)


class _LocalEndpoint:
    """One peer, from `open` to `fence`."""

    def __init__(self, peer: PeerName, folder: _Folder, regions: LocalRegions) -> None:
        """Make the socket and the epoch word that peers connect to. Raises OSError."""
        self.peer = peer
        self.card = LocalCard(secrets.randbits(64), secrets.token_hex(16))
        self.ranks: tuple[_FarRank, ...] = ()
        """Ranks of the peer; empty until it is attached."""
        self.readers: list[ReaderLink] = []
        """Connections of the peer's ranks to us."""
        self._regions = regions
        self._folder = folder
        self._strangers: list[socket.socket] = []
        """Connections that have said nothing yet."""
        self._word = EpochWord()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            self._word.end()
            raise
        try:
            self._listener.setblocking(False)
            path = folder.path(self.card.name)
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(_BACKLOG)
        except OSError:
            self.close()
            raise

    def attach(self, cards: Sequence[LocalCard], tables: Sequence[dict[RegionId, RemoteRegion]]) -> None:
        """Raises OSError or TransportError; then nobody is attached."""
        ranks: list[_FarRank] = []
        try:
            for card, table in zip(cards, tables, strict=True):
                ranks.append(_FarRank(card.token, table, self._connect(card)))
        except (OSError, TransportError):
            for rank in ranks:
                rank.link.close()
            raise
        self.ranks = tuple(ranks)

    def exchange(self) -> None:
        """Let in who connects, send what waits, hear what was acknowledged."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody waits
                break
            connection.setblocking(False)
            self._strangers.append(connection)
        if not self.ranks:
            return
        for connection in self._strangers[:]:
            self._greet(connection)
        for rank in self.ranks:
            rank.link.advance()

    def heard(self) -> list[Notification]:
        ranks = {rank.token: number for number, rank in enumerate(self.ranks)}
        out: list[Notification] = []
        for reader in self.readers:
            out += [Notification(self.peer, data, ranks[reader.writer]) for data in reader.heard]
            reader.heard.clear()
        return out

    def close(self) -> None:
        """The fence, in both directions: our readers throw away what they copied, and we copy no more."""
        self._word.end()
        for rank in self.ranks:
            rank.link.close()
        for reader in self.readers:
            reader.close()
        for connection in self._strangers:
            connection.close()
        self._listener.close()
        with suppress(OSError):
            os.unlink(self._folder.path(self.card.name))

    def _connect(self, card: LocalCard) -> WriterLink:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(self._folder.path(card.name))
            _check_user(connection)
            hello = LocalHello(card.token, self.card.token, tuple((r.id, r.num_bytes) for r in self._regions.all))
            files = [region.file for region in self._regions.all if region.file is not None]
            return WriterLink(connection, hello, [self._word.file, *files])
        except (OSError, TransportError):
            connection.close()
            raise

    def _greet(self, connection: socket.socket) -> None:
        """Hear its hello, if it is there. Whoever is none of the peer's ranks, or is there already, is sent away."""
        files: list[int] = []
        try:
            data, files, _, _ = socket.recv_fds(connection, PACKET_BYTES, MAX_REGIONS + 1, socket.MSG_CMSG_CLOEXEC)
            self._strangers.remove(connection)
            self.readers.append(self._meet(connection, decode_hello(data), files))
        except BlockingIOError:
            return
        except (OSError, TransportError) as error:
            log.warning("%s: a connection is refused: %s", self.peer, error)
            with suppress(ValueError):
                self._strangers.remove(connection)
            connection.close()
        finally:
            for file in files:
                os.close(file)

    def _meet(self, connection: socket.socket, hello: LocalHello, files: Sequence[int]) -> ReaderLink:
        _check_user(connection)
        is_known = any(rank.token == hello.writer for rank in self.ranks)
        if not is_known or hello.reader != self.card.token:
            raise TransportError("it is not from the peer")
        if any(reader.writer == hello.writer for reader in self.readers):
            raise TransportError("the peer is connected already")
        if len(files) != 1 + len(hello.regions):
            raise TransportError("its files do not go with its regions")
        regions = {id: (file, size) for (id, size), file in zip(hello.regions, files[1:], strict=True)}
        memory = FarMemory(files[0], regions, self._regions.access)
        return ReaderLink(connection, hello.writer, memory, self._regions)


class LocalTransport:
    """`Transport` between processes of one user on one machine.

    Regions are memory of fixed size that has a descriptor, all of one rank on one device.
    """

    evidence = Evidence.COMPLETION
    """The reader acknowledges what it has copied itself."""

    def __init__(self, folder: Path, access_to: Callable[[str], MemoryAccess] = host_access) -> None:
        """`folder`: private, and the same for all peers. `access_to`: what maps and copies memory of a device, named as
        in Region. Raises TransportError."""
        problem = machine_problem()
        if problem is not None:
            raise TransportError(f"local transport: {problem}")
        self._folder = _Folder(folder)
        self._regions: dict[RegionId, Region] = {}
        self._access_to = access_to
        self._access: MemoryAccess = HostAccess()
        """What maps and copies on the device of all regions."""
        self._endpoints: dict[PeerName, _LocalEndpoint] = {}
        self._writes: dict[WriteId, tuple[PeerName, WriterLink]] = {}
        self._write_ids = itertools.count(1)
        self._turns = itertools.count()
        self._closed = False

    def register(self, region: Region) -> None:
        if self._endpoints:
            raise TransportError(f"register region {region.id}: an endpoint is open already")
        if region.id in self._regions or region.num_bytes <= 0 or region.base <= 0:
            raise TransportError(f"register region {region.id}: id in use, or no memory")
        if region.file is None or len(self._regions) == MAX_REGIONS:
            raise TransportError(f"register region {region.id}: one of too many, or not memory that peers could map")
        try:
            if not self._regions:
                self._access = self._access_to(region.device)
            elif region.device not in {known.device for known in self._regions.values()}:
                raise TransportError(f"it is on {region.device}, those before it are not")
            self._access.check(region.file, region.num_bytes)
        except TransportError as error:
            raise TransportError(f"register region {region.id}: {error}") from None
        # A descriptor of its own: whose the file is may close it and keep the memory.
        self._regions[region.id] = replace(region, file=os.dup(region.file))

    def open(self, peer: PeerName) -> bytes:
        if self._closed or peer in self._endpoints:
            raise TransportError(f"open {peer}: the transport is closed or has an endpoint for it")
        try:
            regions = LocalRegions(self._regions.values(), self._access)
            endpoint = self._endpoints[peer] = _LocalEndpoint(peer, self._folder, regions)
        except OSError as error:
            raise TransportError(f"open {peer}: {error.strerror}") from None
        return encode_card(endpoint.card)

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.ranks:
            raise TransportError(f"attach to {peer}: its endpoint is not open, or attached already")
        check_ranks(peer, ranks)
        tables = [index_remote(peer, rank.regions) for rank in ranks]
        try:
            cards = [decode_card(rank.metadata) for rank in ranks]
            if endpoint.card in cards:
                raise TransportError("this is our own metadata")
            endpoint.attach(cards, tables)
        except TransportError as error:
            raise TransportError(f"attach to {peer}: {error}") from None
        except OSError as error:
            raise TransportError(f"attach to {peer}: nobody is at its socket: {error.strerror}") from None

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not 0 <= rank < len(endpoint.ranks) or not endpoint.ranks[rank].link.is_open:
            raise TransportError(f"write to {peer}: its endpoint is not attached, has no rank {rank}, or is broken")
        far = endpoint.ranks[rank]
        check_write(peer, copies, notification, self._regions, far.regions)
        if len(copies) > MAX_COPIES:
            raise TransportError(f"write to {peer}: {len(copies)} copies, at most {MAX_COPIES}")
        write = WriteId(next(self._write_ids))
        self._writes[write] = (peer, far.link)
        far.link.start(write, encode_write(write, copies, notification))
        return write

    def poll(self, write: WriteId) -> WriteState:
        self._progress()
        found = self._writes.get(write)
        if found is None:
            return WriteState.ERROR
        state = found[1].take_state(write)
        if state is not WriteState.PENDING:
            del self._writes[write]
        return state

    def notifications(self) -> list[Notification]:
        self._progress()
        return [notification for endpoint in self._endpoints.values() for notification in endpoint.heard()]

    def fence(self, peer: PeerName) -> FenceResult:
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            self._writes = {id: found for id, found in self._writes.items() if found[0] != peer}
            endpoint.close()
        return FenceResult.CLOSED

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.fence(peer)
        for region in self._regions.values():
            if region.file is not None:
                os.close(region.file)
        self._regions.clear()
        if not self._closed:
            self._folder.close()
        self._closed = True

    def _progress(self) -> None:
        """Let all connections move, and copy for everybody in turn, up to so many bytes as a turn has."""
        for endpoint in self._endpoints.values():
            endpoint.exchange()
        readers = [reader for endpoint in self._endpoints.values() for reader in endpoint.readers if reader.is_open]
        if not readers:
            return
        first = next(self._turns) % len(readers)
        waiting = deque(readers[first:] + readers[:first])
        left = self._access.turn_bytes
        while waiting and left > 0:
            reader = waiting.popleft()
            cost = reader.advance(min(left, self._access.slice_bytes))
            left -= cost
            if cost:
                waiting.append(reader)


def _check_user(connection: socket.socket) -> None:
    """Raises TransportError when another user is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise TransportError("another user is at the other end")
