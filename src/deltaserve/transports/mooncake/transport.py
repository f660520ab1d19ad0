"""Transport over Mooncake's transfer engine: one engine per peer, each in a child process that maps the same regions.

The library cannot end what it has begun: unregistering memory stops new writes only, its destructor waits, and its
status calls block. So the fence is the end of the process that owns the engine, its connections and its mapping of the
arenas, which must be shared memory (`Region.file`). Starting a process takes longer than a request should wait, so the
next one is always started ahead: nothing of an engine depends on its peer before `attach`.

Notifications are ours: an engine process tells the other one after the library has reported all data written.
"""

import atexit
import itertools
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
from deltaserve.transports.mooncake.frames import (
    AttachEngines,
    EngineCard,
    FarEngine,
    NoticeHeard,
    PostWrite,
    WriteSettled,
    decode_card,
    encode_card,
)
from deltaserve.transports.mooncake.options import MooncakeOptions, version_problem
from deltaserve.transports.mooncake.process import EngineProcess
from deltaserve.transports.registry import LibraryError

_START_ATTEMPTS = 3
"""The library looks for a free port and binds it later: another one may have been faster."""


@dataclass(frozen=True, slots=True)
class _RankEngines:
    """A rank of the peer: its regions, and where its engine has mapped them."""

    regions: Mapping[RegionId, RemoteRegion]
    bases: Mapping[RegionId, int]


@dataclass(slots=True)
class _Engine:
    """The endpoint for one peer."""

    process: EngineProcess
    card: EngineCard
    ranks: tuple[_RankEngines, ...] = ()
    settled: dict[int, WriteState] = field(default_factory=dict)
    """Writes that ended and were not asked for yet."""
    heard: list[tuple[int, bytes]] = field(default_factory=list)
    """(rank, notification) not fetched yet."""

    def pump(self) -> None:
        """Take what the process has said."""
        for frame in self.process.receive():
            if isinstance(frame, WriteSettled):
                self.settled[frame.write] = WriteState.DONE if frame.is_done else WriteState.ERROR
            elif isinstance(frame, NoticeHeard):
                self.heard.append((frame.rank, frame.data))


class MooncakeTransport:
    """`Transport` over Mooncake. Call `close`, else its processes end when this one does."""

    evidence = Evidence.CONTENTS
    """What DONE is worth depends on the versions of both sides: before 0.3.12 it says nothing over TCP."""

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._regions: dict[RegionId, Region] = {}
        self._engines: dict[PeerName, _Engine] = {}
        self._spare: EngineProcess | None = None
        self._writes: dict[WriteId, PeerName] = {}
        self._write_ids = itertools.count(1)
        self._unfenced: set[PeerName] = set()
        self._closed = False
        atexit.register(self.close)

    def register(self, region: Region) -> None:
        if self._engines:
            raise TransportError(f"register region {region.id}: an endpoint is open already")
        if region.id in self._regions or region.num_bytes <= 0 or region.base <= 0:
            raise TransportError(f"register region {region.id}: id in use, or no memory")
        if region.device != "cpu" or region.file is None:
            raise TransportError(f"register region {region.id}: mooncake moves CPU memory that processes can share")
        self._regions[region.id] = replace(region, file=os.dup(region.file))
        self._drop_spare()

    def open(self, peer: PeerName) -> bytes:
        if self._closed or peer in self._engines:
            raise TransportError(f"open {peer}: the transport is closed or has an endpoint for it")
        engine = self._take_engine(peer)
        self._engines[peer] = engine
        return encode_card(engine.card)

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        engine = self._engines.get(peer)
        if engine is None or engine.ranks:
            raise TransportError(f"attach to {peer}: its endpoint is not open, or attached already")
        check_ranks(peer, ranks)
        cards = [self._card(peer, engine, rank) for rank in ranks]
        engine.ranks = tuple(
            _RankEngines(index_remote(peer, rank.regions), _bases(peer, rank, card))
            for rank, card in zip(ranks, cards, strict=True)
        )
        engine.process.send(AttachEngines(tuple(FarEngine(c.host, c.port, c.notice_port, c.token) for c in cards)))

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        engine = self._engines.get(peer)
        if engine is None or not engine.process.is_alive or not 0 <= rank < len(engine.ranks):
            raise TransportError(f"write to {peer}: its endpoint is not attached, has no rank {rank}, or is broken")
        far = engine.ranks[rank]
        check_write(peer, copies, notification, self._regions, far.regions)
        write = WriteId(next(self._write_ids))
        own = engine.card.bases
        post = PostWrite(
            write=write,
            rank=rank,
            sources=_packed(own[src.region] + src.offset for src, _ in copies),
            targets=_packed(far.bases[dst.region] + dst.offset for _, dst in copies),
            lengths=_packed(src.num_bytes for src, _ in copies),
            notification=notification,
        )
        engine.process.send(post)
        self._writes[write] = peer
        return write

    def poll(self, write: WriteId) -> WriteState:
        peer = self._writes.get(write)
        if peer is None:
            return WriteState.ERROR
        engine = self._engines[peer]
        engine.pump()
        state = engine.settled.pop(write, None)
        if state is None and engine.process.is_alive:
            return WriteState.PENDING
        del self._writes[write]
        return state or WriteState.ERROR

    def notifications(self) -> list[Notification]:
        out: list[Notification] = []
        for peer, engine in self._engines.items():
            engine.pump()
            out += [Notification(peer, data, rank) for rank, data in engine.heard]
            engine.heard.clear()
        return out

    def fence(self, peer: PeerName) -> FenceResult:
        engine = self._engines.pop(peer, None)
        if engine is not None:
            gone = engine.process.kill()
            self._writes = {write: owner for write, owner in self._writes.items() if owner != peer}
            if not (gone and self._options.protocol in self._options.fenced):
                self._unfenced.add(peer)
        return FenceResult.IMPOSSIBLE if peer in self._unfenced else FenceResult.CLOSED

    def close(self) -> None:
        self._closed = True
        for peer in list(self._engines):
            self.fence(peer)
        self._drop_spare()
        for region in self._regions.values():
            if region.file is not None:
                os.close(region.file)
        self._regions.clear()
        atexit.unregister(self.close)

    def _take_engine(self, peer: PeerName) -> _Engine:
        """An engine that is ready, and the next one started. Raises TransportError."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            process, self._spare = self._spare or self._start(), None
            try:
                card = process.wait_ready()
            except LibraryError as error:
                process.kill()
                raise LibraryError(f"open {peer}: {error}") from None
            except TransportError as error:
                process.kill()
                if attempt == _START_ATTEMPTS:
                    raise TransportError(f"open {peer}: {error}") from None
            else:
                with suppress(TransportError):  # the next `open` tries again, and has somebody to tell
                    self._spare = self._start()
                return _Engine(process, card)
        raise AssertionError("unreachable")

    def _start(self) -> EngineProcess:
        return EngineProcess(self._options, list(self._regions.values()))

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    @staticmethod
    def _card(peer: PeerName, engine: _Engine, rank: RemoteRank) -> EngineCard:
        try:
            card = decode_card(rank.metadata)
        except TransportError as error:
            raise TransportError(f"attach to {peer}: {error}") from None
        problem = version_problem(card.version)
        if problem is not None:
            raise TransportError(f"attach to {peer}: its {problem}")
        if card.token == engine.card.token:
            raise TransportError(f"attach to {peer}: this is our own metadata")
        return card


def _bases(peer: PeerName, rank: RemoteRank, card: EngineCard) -> dict[RegionId, int]:
    missing = [region.id for region in rank.regions if region.id not in card.bases]
    if missing:
        raise TransportError(f"attach to {peer}: its engine has not mapped region {missing[0]}")
    return {RegionId(region.id): card.bases[region.id] for region in rank.regions}


def _packed(numbers: Iterable[int]) -> bytes:
    return array("Q", numbers).tobytes()
