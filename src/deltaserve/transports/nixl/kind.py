"""The entry of this transport: see `TransportKind`."""

import importlib
from collections.abc import Mapping

from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Sharing, Transport, TransportError
from deltaserve.transports.gpu_trial import cuda_major
from deltaserve.transports.nixl.checks import check
from deltaserve.transports.nixl.library import fitting_packages, how_to_install
from deltaserve.transports.nixl.options import FENCED_BY_CLOSE, NixlOptions
from deltaserve.transports.nixl.ucx_environment import silent_ucx_environment
from deltaserve.transports.registry import (
    DataAddress,
    DataNetwork,
    LibraryError,
    TransferFlags,
    TransportKind,
    TransportOptions,
)


def _make(me: PeerName, boot: Boot, options: TransportOptions) -> Transport:
    """Loads the library, which who does not name it does not need. Raises TransportError."""
    own = NixlOptions(options.tls, options.devices, fenced_by_close=FENCED_BY_CLOSE | options.fenced)
    try:
        adapter = importlib.import_module("deltaserve.transports.nixl.transport")
        transport: Transport = adapter.NixlTransport(me, boot, own)
    except TransportError:
        raise
    except Exception as error:  # whatever a library raises that is missing, broken, or of another version
        raise LibraryError(f"{type(error).__name__}: {error}") from None
    return transport


def _environment(options: TransportOptions) -> Mapping[str, str]:
    return silent_ucx_environment(options.tls, options.devices)


def _listen(flags: TransferFlags, network: DataNetwork) -> DataAddress:
    """Raises ConfigError where UCX would find no transport."""
    if flags.tls == "auto" and not set(network.devices.split(",")) & set(network.addresses):
        raise ConfigError(
            f"--transfer-devices {network.devices}: none is an interface for tcp; add --transfer-tls rc,tcp,self"
        )
    return DataAddress(network.devices)


KIND = TransportKind(
    name="nixl",
    sharing=Sharing.PRIVATE,
    evidence=Evidence.COMPLETION,
    tls={"cpu": "tcp,self", "cuda": "tcp,cuda_copy,self"},
    packages=fitting_packages(cuda_major()),
    install=how_to_install(cuda_major()),
    hint="look at --transfer-tls and --transfer-devices",
    make=_make,
    checks=check,
    listen=_listen,
    environment=_environment,
)
