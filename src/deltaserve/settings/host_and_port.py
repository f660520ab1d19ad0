"""What an address of a listener means; nothing here imports the settings, which a server need not load."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Whether a listener on `host` has every address of this machine, and none to be called by. A lone 0 is one too."""
    return set(host) <= set("0.:")


def authority(host: str, port: int) -> str:
    """Host and port as they stand in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
