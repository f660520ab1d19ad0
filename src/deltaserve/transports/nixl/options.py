"""How NIXL is set up. Nothing here needs the library."""

from dataclasses import dataclass

from deltaserve.transports.nixl.ucx_environment import ucx_environment

FENCED_BY_CLOSE = frozenset({"tcp", "self", "cuda_copy"})
"""UCX transports whose late bytes stop when the receiver destroys its endpoint: bytes pass through its own process.

Shared memory (sysv, posix, cma, xpmem, shm) and cuda_ipc are not: there a living writer needs nobody on the other side.
RDMA transports are not listed because nobody measured them here; `NixlOptions.fenced_by_close` states it for a site.
"""


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How UCX is set up for this process."""

    tls: str
    """UCX_TLS: comma separated transports. `tcp,self` on CPU; with cuda memory `tcp,self,cuda_copy`."""
    net_devices: str
    """UCX_NET_DEVICES. `lo` keeps every listener on this host; UCX tcp otherwise listens on all interfaces."""
    progress_delay_us: int = 10_000
    """Longest sleep of the library's progress thread. 0: no thread, bytes move only while this side polls."""
    fenced_by_close: frozenset[str] = FENCED_BY_CLOSE
    """Transports for which destroying the endpoint is known to be a fence."""


def environment(options: NixlOptions) -> dict[str, str]:
    """What the environment of the process must hold before its first agent exists."""
    return ucx_environment(options.tls, options.net_devices)
