"""Transport over NIXL (UCX): one agent per peer, all of them registering the same regions.

UCX reads its settings from the environment when the first agent is made, so they belong to whoever starts the process:
start it with `environment(options)`. The adapter only verifies: a process that talks over other devices than it was
told to is refused, not repaired. UCX logs to stdout unless UCX_LOG_FILE says otherwise, of workers nothing
unless UCX_LOG_LEVEL does.
"""

import atexit
import itertools
import logging
import os
from collections.abc import Mapping, Sequence

from deltaserve.core.extents import Copy, Region
from deltaserve.core.ids import Boot, PeerName, RegionId
from deltaserve.core.transport import (
    Evidence,
    FenceResult,
    Notification,
    RemoteRank,
    TransportError,
    WriteId,
    WriteState,
)
from deltaserve.core.transport_bounds import check_ranks, check_write, index_remote
from deltaserve.transports.nixl.endpoint import NixlEndpoint, Write, agent_config, batches, memory_of
from deltaserve.transports.nixl.options import NixlOptions, environment

log = logging.getLogger(__name__)


class NixlTransport:
    """`Transport` over NIXL. Call `close` before the interpreter ends: an agent alive then crashes the process."""

    evidence = Evidence.COMPLETION
    """DONE at the writer meant all bytes visible at the reader in 48 of 48 measured runs; the suite repeats it."""

    def __init__(self, me: PeerName, boot: Boot, options: NixlOptions, environ: Mapping[str, str] = os.environ) -> None:
        """`me` and `boot` make agent names unique per process start. Raises TransportError on a wrong environment."""
        for key, wanted in environment(options).items():
            if environ.get(key) != wanted:
                raise TransportError(
                    f"nixl: {key} is {environ.get(key)!r}, expected {wanted!r} before the process starts"
                )
        self._prefix = f"{me}.{boot:016x}"
        self._config = agent_config(options.progress_delay_us)
        self._can_fence = set(options.tls.split(",")) <= options.fenced_by_close
        self._regions: dict[RegionId, Region] = {}
        self._endpoints: dict[PeerName, NixlEndpoint] = {}
        self._writes: dict[WriteId, tuple[PeerName, Write]] = {}
        self._unfenced: set[PeerName] = set()
        self._broken: set[PeerName] = set()
        """Peers whose endpoint failed as a whole: nothing arrives any more; only a fence helps."""
        self._opened = itertools.count(1)
        self._write_ids = itertools.count(1)
        self._closed = False
        atexit.register(self.close)

    def register(self, region: Region) -> None:
        if self._endpoints:
            raise TransportError(f"register region {region.id}: an endpoint is open already")
        if region.id in self._regions or region.num_bytes <= 0 or region.base <= 0:
            raise TransportError(f"register region {region.id}: id in use, or no memory")
        memory_of(region.device)
        self._regions[region.id] = region

    def open(self, peer: PeerName) -> bytes:
        if self._closed or peer in self._endpoints:
            raise TransportError(f"open {peer}: the transport is closed or has an endpoint for it")
        name = f"{self._prefix}.{next(self._opened)}>{peer}"
        try:
            endpoint = NixlEndpoint(name, peer, self._config, list(self._regions.values()))
        except TransportError:
            raise
        except Exception as error:  # the library's errors share no base class
            raise TransportError(f"open {peer}: {error}") from None
        self._endpoints[peer] = endpoint
        return endpoint.metadata

    def attach(self, peer: PeerName, ranks: Sequence[RemoteRank]) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.is_attached:
            raise TransportError(f"attach to {peer}: its endpoint is not open, or attached already")
        check_ranks(peer, ranks)
        tables = [index_remote(peer, rank.regions) for rank in ranks]
        for region in (region for rank in ranks for region in rank.regions):
            memory_of(region.device)
        try:
            endpoint.attach([(rank.metadata, table) for rank, table in zip(ranks, tables, strict=True)])
        except TransportError:
            raise
        except Exception as error:  # the library's errors share no base class
            raise TransportError(f"attach to {peer}: {error}") from None

    def write(self, peer: PeerName, copies: Sequence[Copy], notification: bytes | None, rank: int = 0) -> WriteId:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not 0 <= rank < len(endpoint.ranks) or peer in self._broken:
            raise TransportError(f"write to {peer}: its endpoint is not attached, has no rank {rank}, or is broken")
        far = endpoint.ranks[rank]
        check_write(peer, copies, notification, self._regions, far.regions)
        write = Write(far.agent, batches(copies, self._regions, far.regions), notification)
        try:
            state = endpoint.start(write)
        except Exception as error:  # the library's errors share no base class
            raise TransportError(f"write to {peer}: {error}") from None
        write_id = WriteId(next(self._write_ids))
        if state is not WriteState.ERROR:
            self._writes[write_id] = (peer, write)
        return write_id

    def poll(self, write: WriteId) -> WriteState:
        found = self._writes.get(write)
        if found is None:
            return WriteState.ERROR
        peer, posted = found
        state = self._endpoints[peer].poll(posted)
        if state is not WriteState.PENDING:
            del self._writes[write]
        return state

    def notifications(self) -> list[Notification]:
        out: list[Notification] = []
        for peer, endpoint in self._endpoints.items():
            try:
                out += [Notification(peer, message, rank) for rank, message in endpoint.notifications()]
            except Exception as error:  # one peer's failure must not hide the others' messages
                if peer not in self._broken:
                    log.warning("nixl endpoint for %s is broken: %s", peer, error)
                    self._broken.add(peer)
        return out

    def fence(self, peer: PeerName) -> FenceResult:
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            gone = endpoint.destroy(self._forget_writes(peer))
            self._broken.discard(peer)
            if not (gone and self._can_fence):
                self._unfenced.add(peer)
        return FenceResult.IMPOSSIBLE if peer in self._unfenced else FenceResult.CLOSED

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.fence(peer)
        self._regions.clear()
        self._closed = True
        atexit.unregister(self.close)

    def _forget_writes(self, peer: PeerName) -> list[Write]:
        ids = [write_id for write_id, (owner, _) in self._writes.items() if owner == peer]
        return [self._writes.pop(write_id)[1] for write_id in ids]
