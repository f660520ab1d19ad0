"""The network devices of this machine, as UCX names them: interfaces, and RDMA devices with a port."""

import socket
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

import psutil

from deltaserve.core.errors import ConfigError

_SYSFS = Path("/sys/class")


def net_devices(sysfs: Path = _SYSFS) -> list[str]:
    """`eth0`, and `mlx5_0:1` for each port of an RDMA device; empty where the kernel does not tell."""
    interfaces = sorted(path.name for path in sysfs.glob("net/*"))
    ports = sorted(f"{path.parents[1].name}:{path.name}" for path in sysfs.glob("infiniband/*/ports/*"))
    return interfaces + ports


def interface_addresses() -> dict[str, list[str]]:
    """IPv4 addresses of each interface."""
    interfaces = psutil.net_if_addrs().items()
    return {name: [entry.address for entry in own if entry.family == socket.AF_INET] for name, own in interfaces}


def check_devices(asked: str, known: Collection[str]) -> None:
    """Raises ConfigError for a device of --transfer-devices that is not there; UCX would only find no transport.

    An RDMA device may be named without its port.
    """
    names = {*known, *(name.partition(":")[0] for name in known)}
    for device in asked.split(","):
        if known and device not in names:
            near = get_close_matches(device, names, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"--transfer-devices {asked}: this machine has no {device}; {advice}")
