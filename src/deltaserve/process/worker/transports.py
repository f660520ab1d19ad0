"""The transport that a worker's spec names: what it needs of memory, what its completions prove, how it is opened."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from deltaserve.compute.memory.memory_block import Sharing
from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Transport, TransportError
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.mooncake.options import FENCED_BY_DEATH, MooncakeOptions
from deltaserve.transports.mooncake.transport import MooncakeTransport
from deltaserve.transports.nixl.options import FENCED_BY_CLOSE, NixlOptions
from deltaserve.transports.obstacles import LibraryError, cannot_open, memory_kind

_SHARING = {"local": Sharing.READERS, "nixl": Sharing.PRIVATE, "mooncake": Sharing.PROCESSES}
_EVIDENCE = {"local": Evidence.COMPLETION, "nixl": Evidence.COMPLETION, "mooncake": Evidence.CONTENTS}
_WARM_UP = PeerName("nobody")
"""No peer: names of peers are those of instances."""


def sharing_for(spec: WorkerSpec) -> Sharing:
    """Who must be able to map the pages."""
    return _SHARING[spec.transport]


def evidence_of(spec: WorkerSpec) -> Evidence:
    """What a completion of the transport proves; the control plane must know before the transport is there."""
    return _EVIDENCE[spec.transport]


def open_transport(spec: WorkerSpec, me: PeerName, boot: Boot, regions: Sequence[Region]) -> Transport:
    """Transport of the rank `me`, with its regions. Raises TransportError: one line with library, memory, cause and
    way out."""
    try:
        transport = _make(spec, me, boot)
        try:
            for region in regions:
                transport.register(region)
            transport.open(_WARM_UP)  # loads the library: half a second that the first request would wait for
            transport.fence(_WARM_UP)
        except TransportError:
            transport.close()
            raise
    except TransportError as error:
        memory = memory_kind(region.device for region in regions)
        raise TransportError(cannot_open(spec.transport, memory, error)) from None
    return transport


def _make(spec: WorkerSpec, me: PeerName, boot: Boot) -> Transport:
    if spec.transport == "local":
        return LocalTransport(Path(spec.transport_folder))
    stated = (spec.transport_fenced or "").split(",")
    if spec.transport == "mooncake":
        return MooncakeTransport(
            MooncakeOptions(
                host=spec.transport_host,
                protocol=spec.transport_tls,
                devices=spec.transport_devices if spec.transport_tls == "rdma" else "",
                fenced=FENCED_BY_DEATH.union(stated),
            )
        )
    options = NixlOptions(spec.transport_tls, spec.transport_devices, fenced_by_close=FENCED_BY_CLOSE.union(stated))
    return make_nixl(me, boot, options)


def make_nixl(me: PeerName, boot: Boot, options: NixlOptions) -> Transport:
    """Loads the library, which who does not name it does not need. Raises TransportError."""
    try:
        adapter = importlib.import_module("deltaserve.transports.nixl.transport")
        transport: Transport = adapter.NixlTransport(me, boot, options)
    except TransportError:
        raise
    except Exception as error:  # whatever a library raises that is missing, broken, or of another version
        raise LibraryError(f"{type(error).__name__}: {error}") from None
    return transport
