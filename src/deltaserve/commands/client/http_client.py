"""HTTP clients of all tools: a server on this machine is asked directly, whatever proxies the environment names."""

from collections.abc import Mapping
from ssl import SSLContext
from urllib.parse import urlsplit

import httpx

from deltaserve.core.errors import ConfigError
from deltaserve.settings.host_and_port import is_any, is_loopback
from deltaserve.settings.urls import DEFAULT_URL

_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def http_client(url: str, timeout: float | httpx.Timeout, headers: Mapping[str, str] | None = None) -> httpx.Client:
    """A client for requests below `url`. Raises ConfigError where that is none, or the environment's proxy cannot
    be used."""
    verify, trusts_environment = _route(url)
    try:
        return httpx.Client(base_url=url, timeout=timeout, headers=headers, verify=verify, trust_env=trusts_environment)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise _unusable(url, error) from None


def async_http_client(
    url: str,
    timeout: float | httpx.Timeout,
    headers: Mapping[str, str] | None = None,
    limits: httpx.Limits = _NO_LIMITS,
) -> httpx.AsyncClient:
    """A client as `http_client` makes, for any number of requests at a time."""
    verify, trusts_environment = _route(url)
    try:
        return httpx.AsyncClient(
            base_url=url, timeout=timeout, headers=headers, limits=limits, verify=verify, trust_env=trusts_environment
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise _unusable(url, error) from None


def fault(url: str, error: Exception) -> str:
    """Why a request to `url` got no answer, in one line."""
    reason = str(error)[:200] or type(error).__name__
    if not isinstance(error, httpx.ConnectError):
        return (
            f"{url}: no whole answer came ({type(error).__name__}, {reason}); try again, or see what that server says"
        )
    if "SSL" in reason:
        return f"{url}: what is there does not speak TLS, or has no certificate that is trusted here ({reason})"
    refused = "Connection refused" if reason == _ALL_FAILED else reason.partition("] ")[2] or reason
    return f"{url}: no server is there ({refused}); start one (`deltaserve serve MODEL`), or give the URL where one is"


_SCHEMES = ("http", "https")
_ALL_FAILED = "All connection attempts failed"
"""What the asynchronous client says of addresses that were all refused."""


def _route(url: str) -> tuple[SSLContext | bool, bool]:
    """Whom to trust over TLS, and whether the environment may name a proxy. A proxy cannot reach this loopback, and one
    that is named wrongly is no concern of a server here: it is not even looked at.
    """
    try:
        urlsplit(url)  # httpx takes half an IPv6 address for a name
        parts = httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url[:200]}: {error}") from None
    if parts.scheme not in _SCHEMES or not parts.host:
        raise ConfigError(f"{url[:200]}: no URL of a server; one is {DEFAULT_URL}")
    if not is_loopback(parts.host) and not (parts.host and is_any(parts.host)):
        return True, True
    return httpx.create_ssl_context() if parts.scheme == "https" else True, False


def _unusable(url: str, error: Exception) -> ConfigError:
    reason = str(error)[:150].rstrip(".")
    return ConfigError(
        f"{url[:200]}: the proxy of the environment cannot be used ({reason}); mend it, or name the host in NO_PROXY"
    )
