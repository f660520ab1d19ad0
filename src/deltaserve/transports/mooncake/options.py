"""How Mooncake's engines are set up."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

INSTALL = "pip install 'deltaserve[mooncake]', and on Debian apt-get install libibverbs1 libnuma1 libcurl4"
"""What a machine needs, beside deltaserve itself."""
PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
FENCED_BY_DEATH = frozenset({"tcp"})
"""Protocols whose late bytes stop when the engine's process has ended: over TCP its own threads write them.

RDMA is not listed because nobody measured it here; `MooncakeOptions.fenced` states it for a site.
"""


_OLD_FRAMING = "MC_TCP_PROTO"
"""Variable with which the library can be told not to wait for acknowledgements."""
_FIRST_ACKNOWLEDGED = (0, 3, 12)
"""First version whose reader's engine acknowledges TCP writes; before, DONE and our notification overtook the data."""


def version_problem(version: str) -> str | None:
    """Why a library of this version cannot be used, here or at a peer."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version)
    if found is not None and tuple(map(int, found.groups())) >= _FIRST_ACKNOWLEDGED:
        return None
    wanted = ".".join(map(str, _FIRST_ACKNOWLEDGED))
    return f"mooncake {version[:40] or 'of unknown version'} announces what has not landed; {wanted} or newer is needed"


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What all engines of a transport have in common."""

    host: str = "127.0.0.1"
    """IPv4 address of this machine under which peers reach it; nothing listens on another."""
    protocol: str = "tcp"
    """Protocol of the data: `tcp` or `rdma`."""
    devices: str = ""
    """RDMA devices, comma separated; empty: all. Of no meaning over TCP."""
    fenced: frozenset[str] = FENCED_BY_DEATH
    """Protocols for which the end of the engine's process is known to be a fence."""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Environment of an engine process. The library logs each start and each lost connection unless told
        otherwise."""
        kept = {name: value for name, value in inherited.items() if name != _OLD_FRAMING}
        return {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", **kept, "MC_TCP_BIND_ADDRESS": self.host}
