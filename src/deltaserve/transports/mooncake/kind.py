"""The entry of this transport: see `TransportKind`.

Its completions prove nothing (`Evidence.CONTENTS`): before 0.3.12 the library reported DONE over TCP before the bytes
were there, and nobody measured it over RDMA. Notifications cannot overtake their data: an engine announces what was
acknowledged.
"""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

from deltaserve.core.errors import ConfigError
from deltaserve.core.findings import Level, Line
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Sharing, Transport
from deltaserve.transports.mooncake.options import FENCED_BY_DEATH, INSTALL, PACKAGES, MooncakeOptions
from deltaserve.transports.mooncake.process import engine_problem
from deltaserve.transports.mooncake.transport import MooncakeTransport
from deltaserve.transports.registry import (
    DataAddress,
    DataNetwork,
    TransferFlags,
    TransportKind,
    TransportOptions,
    cannot_open,
)

_ONE_INTERFACE = "mooncake listens on one interface, or add --transfer-tls rdma"


def _options(options: TransportOptions) -> MooncakeOptions:
    devices = options.devices if options.tls == "rdma" else ""
    return MooncakeOptions(options.host, options.tls, devices, FENCED_BY_DEATH | options.fenced)


def _make(me: PeerName, boot: Boot, options: TransportOptions) -> Transport:
    return MooncakeTransport(_options(options))


def check(options: TransportOptions | None) -> Iterator[Line]:
    """One line: whether an engine starts. Who does not ask for this transport needs none."""
    own = MooncakeOptions() if options is None else _options(options)
    problem = engine_problem(own)
    if problem is None:
        yield Line(Level.OK, "transfer", f"mooncake over {own.protocol} on {own.host}: an engine starts")
    else:
        level = Level.OK if options is None else Level.FAIL
        yield Line(level, "transfer", cannot_open("mooncake", ["cpu"], problem))


def _refuse(flags: TransferFlags) -> Iterator[str]:
    if flags.tls not in ("auto", "tcp", "rdma"):
        yield f"--transfer-tls {flags.tls}: with --disaggregation-transfer-backend mooncake it is tcp or rdma"
    if flags.tls != "rdma" and "," in (flags.devices or ""):
        yield f"--transfer-devices {flags.devices}: {_ONE_INTERFACE}"


def _listen(flags: TransferFlags, network: DataNetwork) -> DataAddress:
    """RDMA devices are named without their ports. Raises ConfigError."""
    names, addresses = network.devices.split(","), network.addresses
    own = [name for name in names if name in addresses]
    if flags.tls == "rdma":
        rdma = ",".join(name.partition(":")[0] for name in names if name not in own)
        return DataAddress(rdma, _address_on(network, list(addresses)))
    if flags.devices is not None and len(own) != 1:
        raise ConfigError(f"--transfer-devices {flags.devices}: {_ONE_INTERFACE}")
    return DataAddress(network.devices, _address_on(network, own))


def _address_on(network: DataNetwork, interfaces: list[str]) -> str:
    """The first address of these on the trusted network. Raises ConfigError."""
    trusted = IPv4Network(network.network, strict=False)
    for interface in interfaces:
        for address in network.addresses[interface]:
            if IPv4Address(address) in trusted:
                return address
    raise ConfigError(f"--trusted-data-network {network.network}: {', '.join(interfaces)} has no address on it")


KIND = TransportKind(
    name="mooncake",
    sharing=Sharing.PROCESSES,
    evidence=Evidence.CONTENTS,
    tls={"cpu": "tcp"},
    limits="moves CPU memory only",
    packages=PACKAGES,
    install=INSTALL,
    hint="look at --transfer-tls and --transfer-devices; it moves host memory only",
    make=_make,
    checks=check,
    refuse=_refuse,
    listen=_listen,
)
