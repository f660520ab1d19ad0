"""The entry of this transport: see `TransportKind`."""

from pathlib import Path

from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Sharing, Transport
from deltaserve.transports.local.checks import check
from deltaserve.transports.local.memory import machine_problem
from deltaserve.transports.local.transport import LocalTransport
from deltaserve.transports.registry import TransportKind, TransportOptions


def _make(me: PeerName, boot: Boot, options: TransportOptions) -> Transport:
    return LocalTransport(Path(options.folder))


KIND = TransportKind(
    name="local",
    sharing=Sharing.READERS,
    evidence=Evidence.COMPLETION,
    tls={"cpu": ""},
    limits="only between CPU workers of one `deltaserve serve`, on x86-64",
    is_for_one_serve=True,
    hint="is for CPU workers of one `deltaserve serve` on x86-64",
    make=_make,
    checks=check,
    machine_problem=machine_problem,
)
