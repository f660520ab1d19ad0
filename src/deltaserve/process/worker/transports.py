"""The transport that a worker's spec names, opened."""

from collections.abc import Sequence

from deltaserve.core.extents import Region
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Transport, TransportError
from deltaserve.process.worker.worker_spec import WorkerSpec, transport_options
from deltaserve.transports.registry import cannot_open, transport_kind

_WARM_UP = PeerName("nobody")
"""No peer: names of peers are those of instances."""


def open_transport(spec: WorkerSpec, me: PeerName, boot: Boot, regions: Sequence[Region]) -> Transport:
    """Transport of the rank `me`, with its regions. Raises TransportError: one line with library, memory, cause and
    way out."""
    try:
        transport = transport_kind(spec.transport).make(me, boot, transport_options(spec))
        try:
            for region in regions:
                transport.register(region)
            transport.open(_WARM_UP)  # loads the library: half a second that the first request would wait for
            transport.fence(_WARM_UP)
        except BaseException:
            transport.close()
            raise
    except TransportError as error:
        devices = [region.device for region in regions]
        raise TransportError(cannot_open(spec.transport, devices, error)) from None
    return transport
