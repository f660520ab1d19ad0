"""One NIXL agent = one peer. Everything that touches the library's handles is in this file.

What the library really does decides this code (measured, see tests/transports/test_nixl_rows.py):
releasing a handle does not cancel it, an error on a handle raises, deregistering or forgetting a peer stops nothing.
Only the agent's destructor does. So handles are released when they read DONE, and otherwise in the same breath as the
agent is destroyed; and the agent hangs on exactly one attribute, so that dropping it runs the destructor at once.
"""

import gc
import itertools
import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import PeerName, RegionId
from deltaserve.core.transport import MAX_METADATA_BYTES, RemoteRegion, TransportError, WriteState
from deltaserve.transports.nixl.library import load_bindings

lib = load_bindings()

BACKEND = "UCX"
_MAGIC = b"DSN1"
_HEADER_BYTES = len(_MAGIC) + 4
_ORDINAL_DIGITS = 4

Descriptor = tuple[int, int, int]
"""One range of memory: (address, bytes, device ordinal)."""
Batch = tuple[str, list[Descriptor], str, list[Descriptor]]
"""(source memory, descriptors, target memory, descriptors): NIXL wants one kind of memory per side."""


def agent_config(progress_delay_us: int) -> Any:
    """A progress thread that wakes at least every `progress_delay_us`, if this build can be told so; else none.

    The library's own Python wrapper sets the delay to 0, which spins a whole core.
    """
    config = lib.nixlAgentConfig()
    config.useListenThread = False
    config.syncMode = lib.NIXL_THREAD_SYNC_NONE
    config.captureTelemetry = False
    config.useProgThread = progress_delay_us > 0 and _accepts_delay(config, progress_delay_us)
    return config


def _accepts_delay(config: Any, delay_us: int) -> bool:
    try:
        config.pthrDelay = delay_us
    except AttributeError:
        return False
    return bool(config.pthrDelay == delay_us)


def memory_of(device: str) -> tuple[str, int]:
    """`cpu` -> (DRAM, 0); `cuda:1` -> (VRAM, 1)."""
    if device == "cpu":
        return "DRAM", 0
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not ordinal.isdecimal() or len(ordinal) > _ORDINAL_DIGITS:
        raise TransportError(f"device {device[:80]!r} cannot be registered: expected cpu or cuda:N")
    return "VRAM", int(ordinal)


def batches(
    copies: Sequence[Copy], local: Mapping[RegionId, Region], remote: Mapping[RegionId, RemoteRegion]
) -> list[Batch]:
    """Copies as descriptor lists, one batch per pair of memory kinds, order kept inside a batch."""
    ours = {id: (region.base, *memory_of(region.device)) for id, region in local.items()}
    theirs = {id: (region.base, *memory_of(region.device)) for id, region in remote.items()}
    out: dict[tuple[str, str], Batch] = {}
    for src, dst in copies:
        src_base, src_memory, src_ordinal = ours[src.region]
        dst_base, dst_memory, dst_ordinal = theirs[dst.region]
        batch = out.get((src_memory, dst_memory))
        if batch is None:
            batch = out[src_memory, dst_memory] = (src_memory, [], dst_memory, [])
        batch[1].append((src_base + src.offset, src.num_bytes, src_ordinal))
        batch[3].append((dst_base + dst.offset, dst.num_bytes, dst_ordinal))
    return list(out.values())


class FarRank(NamedTuple):
    """A rank of the peer: the name of its agent, and where we may write."""

    agent: str
    regions: Mapping[RegionId, RemoteRegion]


class Write:
    """Batches of one write: posted one after the other, the notification bound to the last."""

    __slots__ = ("agent", "batches", "handle", "notification")

    def __init__(self, agent: str, todo: Sequence[Batch], notification: bytes | None) -> None:
        self.agent = agent
        self.batches = deque(todo)
        self.notification = notification
        self.handle: int | None = None


class NixlEndpoint:
    """Owns the agent for one peer, and all its handles. After `destroy` nothing else may be called."""

    def __init__(self, name: str, peer: PeerName, config: Any, regions: Sequence[Region]) -> None:
        self.name = name
        self.peer = peer
        self.ranks: tuple[FarRank, ...] = ()
        """Ranks of the peer; empty until it is attached."""
        self._stuck: list[int] = []
        """Handles of writes that ended in ERROR: perhaps still in flight, so not released before the agent goes."""
        self._agent: Any | None = lib.nixlAgent(name, config)
        try:
            self._backend = self._live().createBackend(BACKEND, {})
            for region in regions:
                self._register(region)
            self.metadata = self._metadata()
            """What the peer needs to attach."""
        except Exception:
            self._agent = None  # the error's traceback keeps this object; it must not keep the agent
            raise

    def _register(self, region: Region) -> None:
        memory, ordinal = memory_of(region.device)
        descriptors = [(region.base, region.num_bytes, ordinal, "")]
        try:
            self._live().registerMem(lib.nixlRegDList(_segment(memory), descriptors), [self._backend])
        except Exception as error:  # the library's errors share no base class
            what = f"{region.num_bytes} bytes of {region.device}"
            raise TransportError(f"open {self.peer}: the library does not register {what}: {error}") from None

    @property
    def is_attached(self) -> bool:
        return bool(self.ranks)

    def attach(self, ranks: Sequence[tuple[bytes, Mapping[RegionId, RemoteRegion]]]) -> None:
        """(metadata, regions) of every rank of the peer. What is loaded before a wrong one is loaded again later."""
        agents = [self._load(metadata) for metadata, _ in ranks]
        self.ranks = tuple(FarRank(agent, regions) for agent, (_, regions) in zip(agents, ranks, strict=True))

    def _load(self, metadata: bytes) -> str:
        blob = metadata[_HEADER_BYTES:]
        if metadata[:_HEADER_BYTES] != _MAGIC + zlib.crc32(blob).to_bytes(4, "little"):
            raise TransportError(f"attach to {self.peer}: this is not the metadata of a nixl endpoint")
        name = bytes(self._live().loadRemoteMD(blob)).decode()
        if name == self.name:
            raise TransportError(f"attach to {self.peer}: this is our own metadata")
        return name

    def start(self, write: Write) -> WriteState:
        """Post the first batch, or send the bare notification.

        Raises what the library raised if nothing was started; ERROR if something may have been.
        """
        if not write.batches and write.notification is not None:
            return self._notify(write.agent, write.notification)
        handle = self._create(write)
        return self._post(write, handle)

    def poll(self, write: Write) -> WriteState:
        """Drive a started write. Raises nothing; after DONE or ERROR the write holds no handle."""
        if write.handle is None:  # a bare notification, already gone
            return WriteState.DONE
        state = self._state_of(write.handle)
        if state is WriteState.ERROR:
            return self._give_up(write)
        if state is WriteState.PENDING:
            return state
        self._live().releaseXferReq(write.handle)
        write.handle = None
        if not write.batches:
            return WriteState.DONE
        try:
            handle = self._create(write)
        except Exception:  # the library's errors share no base class; earlier batches have been written: not "nothing"
            return WriteState.ERROR
        return self._post(write, handle)

    def notifications(self) -> list[tuple[int, bytes]]:
        """(rank, message) of what arrived from the attached peer. Raises what the library raises."""
        if not self.ranks:
            return []
        arrived: dict[str, list[bytes]] = self._live().getNotifs({})
        return [(rank, message) for rank, far in enumerate(self.ranks) for message in arrived.get(far.agent, ())]

    def destroy(self, pending: Sequence[Write]) -> bool:
        """Release all handles and destroy the agent; whether it is really gone."""
        handles = itertools.chain(self._stuck, (write.handle for write in pending if write.handle is not None))
        for handle in handles:
            try:
                self._live().releaseXferReq(handle)
            except (
                Exception
            ):  # refused: the handle's few KiB are lost, the destructor below stops its bytes all the same
                continue
        self._stuck.clear()
        for write in pending:
            write.handle = None
        watch = weakref.ref(self._live())
        self._agent = None
        if watch() is not None:
            gc.collect()
        return watch() is None

    def _metadata(self) -> bytes:
        """The library's metadata behind a checksum: its own parser is not meant for damaged input."""
        blob = bytes(self._live().getLocalMD())
        framed = _MAGIC + zlib.crc32(blob).to_bytes(4, "little") + blob
        if len(framed) > MAX_METADATA_BYTES:
            raise TransportError(f"open {self.peer}: metadata of {len(framed)} bytes, at most {MAX_METADATA_BYTES}")
        return framed

    def _create(self, write: Write) -> int:
        src_memory, src, dst_memory, dst = write.batches.popleft()
        notification = b"" if write.batches or write.notification is None else write.notification
        return int(
            self._live().createXferReq(
                lib.NIXL_WRITE,
                lib.nixlXferDList(_segment(src_memory), src),
                lib.nixlXferDList(_segment(dst_memory), dst),
                write.agent,
                notification,
                [self._backend],
            )
        )

    def _post(self, write: Write, handle: int) -> WriteState:
        write.handle = handle
        try:
            status = self._live().postXferReq(handle)
        except Exception:  # no common base class; some descriptors may already be on their way
            return self._give_up(write)
        if status not in (lib.NIXL_SUCCESS, lib.NIXL_IN_PROG):
            return self._give_up(write)
        return WriteState.PENDING

    def _notify(self, agent: str, notification: bytes) -> WriteState:
        try:
            status = self._live().genNotif(agent, notification, [self._backend])
        except Exception:  # no common base class; it may have left
            return WriteState.ERROR
        return WriteState.DONE if status == lib.NIXL_SUCCESS else WriteState.ERROR

    def _state_of(self, handle: int) -> WriteState:
        try:
            status = self._live().getXferStatus(handle)
        except Exception:  # measured: a dead peer raises instead of returning an error
            return WriteState.ERROR
        if status == lib.NIXL_IN_PROG:
            return WriteState.PENDING
        return WriteState.DONE if status == lib.NIXL_SUCCESS else WriteState.ERROR

    def _give_up(self, write: Write) -> WriteState:
        if write.handle is not None:
            self._stuck.append(write.handle)
            write.handle = None
        write.batches.clear()
        return WriteState.ERROR

    def _live(self) -> Any:
        assert self._agent is not None, f"{self.name} is destroyed"
        return self._agent


def _segment(memory: str) -> Any:
    return lib.VRAM_SEG if memory == "VRAM" else lib.DRAM_SEG
