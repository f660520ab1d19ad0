"""How UCX is set up: by the environment of the process, which it reads when its first worker is made."""

import os

_WITHOUT_VERBS = frozenset({"tcp", "self", "shm", "sysv", "posix", "cma", "xpmem", "cuda", "cuda_copy", "cuda_ipc"})
"""Transports for which no RDMA library is loaded."""


def ucx_environment(tls: str, net_devices: str) -> dict[str, str]:
    """`tls`, `net_devices`: UCX_TLS and UCX_NET_DEVICES.

    Without UCX_TCP_CONN_NB a connection is waited for where the peer is attached to: a firewall that drops the request
    for it held the thread that serves all peers for two minutes.

    With its RDMA module the library's own libibverbs loads the drivers of the system, where there are any, and they the
    system's libibverbs and libnl: with both in a process, its exit crashed (NIXL 1.5, Debian's ibverbs-providers).
    """
    needs_verbs = not set(tls.split(",")) <= _WITHOUT_VERBS
    modules = {} if needs_verbs else {"UCX_MODULES": "^ib"}
    return {"UCX_TLS": tls, "UCX_NET_DEVICES": net_devices, "UCX_TCP_CONN_NB": "y", **modules}


def silent_ucx_environment(tls: str, net_devices: str) -> dict[str, str]:
    """`ucx_environment`, with the log level that the user has set, else silent.

    UCX tells on stdout, which may be somebody's protocol, of variables that it does not know, and of peers that die,
    which is told in our log.
    """
    level = os.environ.get("UCX_LOG_LEVEL", "fatal")
    return {**ucx_environment(tls, net_devices), "UCX_LOG_LEVEL": level}
