"""How UCX is set up: by the environment of the process, which it reads when its first worker is made."""


def ucx_environment(tls: str, net_devices: str) -> dict[str, str]:
    """`tls`, `net_devices`: UCX_TLS and UCX_NET_DEVICES.

    Without UCX_TCP_CONN_NB a connection is waited for where the peer is attached to: a firewall that drops the request
    for it held the thread that serves all peers for two minutes.
    """
    return {"UCX_TLS": tls, "UCX_NET_DEVICES": net_devices, "UCX_TCP_CONN_NB": "y"}
