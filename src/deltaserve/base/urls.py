"""Where a server is, as users write it."""

from deltaserve.base.config import NetworkSettings

_NETWORK = NetworkSettings()
DEFAULT_URL = f"http://{_NETWORK.host}:{_NETWORK.port}"
"""Of a server that was started without --host and --port."""


def server_root(url: str) -> str:
    """Without the /v1 that OpenAI's clients want at the end."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
