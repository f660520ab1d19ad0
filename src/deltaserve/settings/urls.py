"""Where a server is, as users write it."""

import re

from deltaserve.settings.config import NetworkSettings
from deltaserve.settings.host_and_port import authority

_NETWORK = NetworkSettings()
_LAST_PORT = 65535
DEFAULT_URL = f"http://{_NETWORK.host}:{_NETWORK.port}"
"""URL of a server that was started without --host and --port."""


def api_url(network: NetworkSettings) -> str:
    """Where the API of a server with these settings is; a Unix socket as nginx writes it."""
    if network.uds is not None:
        return f"http://unix:{network.uds}:"
    scheme = "http" if network.ssl_certfile is None else "https"
    return f"{scheme}://{authority(network.host, network.port)}"


def url_of(host: str | None, port: int | None) -> str:
    """URL of a server at this host and port; None: the default one."""
    return f"http://{authority(_NETWORK.host if host is None else host, _NETWORK.port if port is None else port)}"


def server_root(url: str) -> str:
    """The URL without the /v1 that OpenAI's clients want at the end."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def admin_root(url: str) -> str | None:
    """Where a server with keys has its admin routes: one port above its API. None when `url` names no port."""
    parts = re.fullmatch(r"(https?://[^/]+:)([0-9]{1,5})(|/.*)", server_root(url))
    if parts is None or int(parts[2]) >= _LAST_PORT:
        return None
    return f"{parts[1]}{int(parts[2]) + 1}{parts[3]}"
