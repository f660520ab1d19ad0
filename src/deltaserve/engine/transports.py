"""The transport that a worker's spec names: what it needs of the memory, what its word is worth, and how it is made."""

from pathlib import Path

from deltaserve.base.ids import Boot, PeerName
from deltaserve.device.memory_block import Sharing
from deltaserve.engine.worker_spec import WorkerSpec
from deltaserve.transport.base import Evidence, Transport
from deltaserve.transport.local import LocalTransport
from deltaserve.transport.mooncake import MooncakeTransport
from deltaserve.transport.mooncake_options import FENCED_BY_DEATH, MooncakeOptions
from deltaserve.transport.nixl import FENCED_BY_CLOSE, NixlOptions, NixlTransport

_SHARING = {"local": Sharing.READERS, "nixl": Sharing.PRIVATE, "mooncake": Sharing.PROCESSES}
_EVIDENCE = {"local": Evidence.COMPLETION, "nixl": Evidence.COMPLETION, "mooncake": Evidence.CONTENTS}


def sharing_for(spec: WorkerSpec) -> Sharing:
    """Who must be able to map the pages."""
    return _SHARING[spec.transport]


def evidence_of(spec: WorkerSpec) -> Evidence:
    """What the transport's word is worth; the control plane must know before the transport is there."""
    return _EVIDENCE[spec.transport]


def make_transport(spec: WorkerSpec, me: PeerName, boot: Boot) -> Transport:
    """Of the rank `me`, without regions yet. Raises TransportError."""
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
    return NixlTransport(me, boot, options)
