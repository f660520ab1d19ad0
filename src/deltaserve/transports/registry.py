"""What a transport is known by: each has an entry (`TransportKind`) in its folder, imported when it is asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from deltaserve.core.branches import TRANSPORTS
from deltaserve.core.files.branch_code import load_branch
from deltaserve.core.findings import Line
from deltaserve.core.ids import Boot, PeerName
from deltaserve.core.transport import Evidence, Sharing, Transport, TransportError

_OPTION = "--disaggregation-transfer-backend"
_LONGEST = 400
"""Characters of what a library says."""


class LibraryError(TransportError):
    """The library is missing, cannot be loaded, or is too old."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How page transfers of a process are set up. A kind reads of it what its library has."""

    folder: str = ""
    """Private, and the same for all workers of one serve."""
    tls: str = ""
    """The ways that data may move by, as the library names them."""
    devices: str = ""
    """Network devices that transfers may use."""
    host: str = "127.0.0.1"
    """Address under which peers reach this machine on the network of page transfers."""
    fenced: frozenset[str] = frozenset()
    """Ways of which this site says that a destroyed endpoint is a fence, beside those known to be."""


@dataclass(frozen=True, slots=True)
class TransferFlags:
    """What was asked for on the command line."""

    tls: str
    """--transfer-tls: `auto`, or the ways that data may move by."""
    devices: str | None
    """--transfer-devices."""


@dataclass(frozen=True, slots=True)
class DataNetwork:
    """What page transfers may use of this machine."""

    network: str
    """The trusted network, as 10.0.0.0/8."""
    devices: str
    """Those asked for, or else the interfaces on that network."""
    addresses: Mapping[str, Sequence[str]]
    """IPv4 addresses of each interface."""


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where page transfers of a worker listen."""

    devices: str
    """As the library wants them."""
    host: str = ""
    """The address on them, for a library that wants one."""


def refuse_nothing(flags: TransferFlags) -> Iterator[str]:
    """Any flags suit."""
    return iter(())


def listen_on_devices(flags: TransferFlags, network: DataNetwork) -> DataAddress:
    """The library takes devices as they are named."""
    return DataAddress(network.devices)


def read_no_environment(options: TransportOptions) -> Mapping[str, str]:
    """The library reads none."""
    return {}


def need_nothing() -> str | None:
    """Any machine suits."""
    return None


def need_no_reach(num_gpus: int) -> str | None:
    """Memory of GPUs goes through the host."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """One transport, and all that the rest of the server must know of it before it is there."""

    name: str
    sharing: Sharing
    """Who must be able to map the pages."""
    evidence: Evidence
    """What its completions prove."""
    tls: Mapping[str, str]
    """Device, `cpu` or `cuda`, whose memory it moves |-> what --transfer-tls auto is; empty: it reads none."""
    limits: str = ""
    """What it is for, where it is not for all workers; for error lines."""
    window_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device |-> most bytes of one write, where what suits most ways is not what suits this one."""
    is_for_one_serve: bool = False
    """Whether both sides must be started by one `serve`."""
    packages: Sequence[str] = ()
    """The first one that is installed brings the library; none: it is part of deltaserve."""
    install: str = ""
    """What to do when the library is missing, broken or too old."""
    hint: str
    """What to look at when the library does not like what it was told."""
    make: Callable[[PeerName, Boot, TransportOptions], Transport]
    """The transport of the rank of that name, in this start of its process. Raises TransportError."""
    checks: Callable[[TransportOptions | None], Iterator[Line]]
    """Findings of `deltaserve doctor`: whether pages can be moved here. None: nobody asked for this transport."""
    refuse: Callable[[TransferFlags], Iterator[str]] = refuse_nothing
    """What may not be asked for with this transport, a line each."""
    listen: Callable[[TransferFlags, DataNetwork], DataAddress] = listen_on_devices
    """Where a worker's transfers listen. Raises ConfigError."""
    environment: Callable[[TransportOptions], Mapping[str, str]] = read_no_environment
    """Variables that the process must have before it starts: its library reads them when it is loaded."""
    machine_problem: Callable[[], str | None] = need_nothing
    """Why it cannot move bytes on this machine, as far as that is known without trying; None: it can."""
    gpu_problem: Callable[[int], str | None] = need_no_reach
    """Why it cannot move bytes between the first so many GPUs of this process; None: it can."""


def transport_kind(name: str) -> TransportKind:
    """The transport of this name, one of core/branches.py. Its vendor's library is not loaded."""
    kind: TransportKind = load_branch(TRANSPORTS[name]).KIND
    return kind


def transport_kinds() -> Iterator[TransportKind]:
    """All that there are, the one that is preferred first."""
    return map(transport_kind, TRANSPORTS)


def installed_version(packages: Iterable[str]) -> tuple[str, str] | None:
    """(package, version) of the first that is installed."""
    for name in packages:
        with suppress(PackageNotFoundError):
            return name, version(name)
    return None


def cannot_open(transport: str, devices: Iterable[str], error: TransportError) -> str:
    """Why a transport cannot be opened, in one line: library, memory, cause, what to do instead.

    `devices`: where the memory is that it should move.
    """
    kind, device = transport_kind(transport), "cpu" if all(device == "cpu" for device in devices) else "cuda"
    said = " ".join(str(error).split())
    said = said if len(said) <= _LONGEST else said[:_LONGEST] + "..."
    way_out = kind.install if isinstance(error, LibraryError) else kind.hint
    memory = "host" if device == "cpu" else "cuda"
    where = f"{_OPTION} {transport} ({_library(kind)}) cannot move {memory} memory here"
    return f"{where}: {said}; {'; or '.join((way_out, _others(kind, device)))}"


def _library(kind: TransportKind) -> str:
    if not kind.packages:
        return "part of deltaserve"
    found = installed_version(kind.packages)
    return f"{kind.packages[0]}, not installed" if found is None else " ".join(found)


def _others(kind: TransportKind, device: str) -> str:
    """What else would move memory of this device."""
    others = [other for other in transport_kinds() if other.name != kind.name and device in other.tls]
    named = [f"{other.name}{' (workers of one serve)' if other.is_for_one_serve else ''}" for other in others]
    ways = [f"{_OPTION} {' or '.join(named)}"] if named else []
    if device != "cpu":
        ways.append("--device cpu")
    if not named:
        ways.append("--disaggregation-mode null, which moves no pages")
    return ", or ".join(ways)
