"""What a user is told when a transport cannot be opened: which library, which memory, why, and what to do instead."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from deltaserve.core.transport import TransportError
from deltaserve.transports.mooncake import options as mooncake_options
from deltaserve.transports.nixl import options as nixl_options

_OPTION = "--disaggregation-transfer-backend"
_LONGEST = 400
"""Characters of what a library says."""


class LibraryError(TransportError):
    """The library is missing, cannot be loaded, or is too old."""


@dataclass(frozen=True, slots=True)
class _Library:
    packages: Sequence[str]
    """The first one that is installed brings it; none: it is part of deltaserve."""
    install: str
    """When it is missing, broken or too old."""
    settings: str
    """When it does not like what it was told."""
    others: Mapping[str, str]
    """Kind of memory |-> what to use in its place."""


_ON_CUDA = "--device cpu, or --disaggregation-mode null, which moves no pages"
_LIBRARIES = {
    "local": _Library(
        (),
        "",
        "is for CPU workers of one `deltaserve serve` on x86-64",
        {"host": f"{_OPTION} nixl", "cuda": f"{_OPTION} nixl"},
    ),
    "nixl": _Library(
        nixl_options.PACKAGES,
        nixl_options.INSTALL,
        "look at --transfer-tls and --transfer-devices",
        {"host": f"{_OPTION} local (workers of one serve) or mooncake", "cuda": _ON_CUDA},
    ),
    "mooncake": _Library(
        mooncake_options.PACKAGES,
        mooncake_options.INSTALL,
        "look at --transfer-tls and --transfer-devices; it moves host memory only",
        {"host": f"{_OPTION} local (workers of one serve) or nixl", "cuda": f"{_OPTION} nixl, or --device cpu"},
    ),
}


def memory_kind(devices: Iterable[str]) -> str:
    """`cuda` when any of the memory is a GPU's, else `host`."""
    return "host" if all(device == "cpu" for device in devices) else "cuda"


def installed_version(packages: Iterable[str]) -> tuple[str, str] | None:
    """(package, version) of the first that is installed."""
    for name in packages:
        with suppress(PackageNotFoundError):
            return name, version(name)
    return None


def cannot_open(transport: str, memory: str, error: TransportError) -> str:
    """One line. `memory`: `host` or `cuda`."""
    library = _LIBRARIES[transport]
    said = " ".join(str(error).split())
    said = said if len(said) <= _LONGEST else said[:_LONGEST] + "..."
    way_out = library.install if isinstance(error, LibraryError) else library.settings
    where = f"{_OPTION} {transport} ({_name(library)}) cannot move {memory} memory here"
    return f"{where}: {said}; {way_out}; or {library.others[memory]}"


def _name(library: _Library) -> str:
    if not library.packages:
        return "part of deltaserve"
    found = installed_version(library.packages)
    return f"{library.packages[0]}, not installed" if found is None else " ".join(found)
