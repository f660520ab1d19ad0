"""Asking a server's admin routes: with keys they are not where the API is, but on the next port of its machine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deltaserve.commands.client.http_client import http_client
from deltaserve.core.errors import ConfigError
from deltaserve.launch.net_devices import interface_addresses
from deltaserve.server.settings import ApiKey, Right
from deltaserve.settings.host_and_port import is_loopback
from deltaserve.settings.urls import admin_root, server_root

_TIMEOUT_S = 10.0
_ELSEWHERE = (httpx.codes.UNAUTHORIZED, httpx.codes.NOT_FOUND)
"""What the API's port answers when the admin routes are on the next one: without a key of it, and with one."""
_ADVICE: dict[int, str] = {
    httpx.codes.UNAUTHORIZED: "it wants a key: --api-key-file FILE, whose first admin key is sent",
    httpx.codes.FORBIDDEN: "the key has no admin right: --api-key-file FILE with a line `SECRET NAMESPACE admin`",
}
_WHERE = "with keys they are on the server's own machine, one port above its API: --admin-url URL"


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """What an admin route said."""

    content: dict[str, Any] | None
    """The answer's content; None: the server was not reached."""
    refusal: str = ""
    """Where it was looked for, what came of it, and what would help."""
    root: str = ""
    """Where the admin routes are."""


def ask_admin(path: str, base_url: str, admin_url: str | None, keys: Sequence[ApiKey]) -> AdminAnswer:
    """GET `path` at `admin_url`; without one wherever `admin_places` names."""
    own = {address for addresses in interface_addresses().values() for address in addresses}
    tried, advice = [], _WHERE
    for root in [server_root(admin_url)] if admin_url else admin_places(base_url, own):
        try:
            with http_client(root, _TIMEOUT_S, _bearer(keys)) as http:
                reply = http.get(path)
            content = reply.json() if reply.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ConfigError, ValueError) as error:
            tried.append(f"{root}{path}: {type(error).__name__}")
            if isinstance(error, httpx.ReadTimeout):
                break  # the same machine would be as slow on the next port
            continue
        if isinstance(content, dict) and not _is_of_the_api(content):
            return AdminAnswer(content, root=root)
        tried.append(f"{root}{path}: " + ("names of the model only" if content else f"HTTP {reply.status_code}"))
        advice = _ADVICE.get(reply.status_code, _WHERE)
        if content is None and reply.status_code not in _ELSEWHERE:
            break
    return AdminAnswer(None, f"{', '.join(tried)}; {advice}")


def ask_text(path: str, root: str, keys: Sequence[ApiKey]) -> str:
    """GET `path` of the admin routes that are at `root`. Raises httpx.HTTPError."""
    with http_client(root, _TIMEOUT_S, _bearer(keys)) as http:
        return http.get(path).raise_for_status().text


def _is_of_the_api(content: dict[str, Any]) -> bool:
    """Whether it is what /server_info tells holders of any key, where the admin routes are elsewhere."""
    return "served_model_name" in content and "engine" not in content


def admin_places(base_url: str, own_addresses: Collection[str]) -> list[str]:
    """Where the API is, on its next port, and there on loopback where the server is on this machine."""
    found = [server_root(base_url)]
    behind = admin_root(base_url)
    if behind is not None:
        found.append(behind)
        host = httpx.URL(behind).host
        if host in own_addresses and not is_loopback(host):
            found.append(behind.replace(host, "127.0.0.1", 1))
    return found


def _bearer(keys: Sequence[ApiKey]) -> dict[str, str]:
    """The header with the first admin key, or the first key where none is one."""
    admins = [key for key in keys if Right.ADMIN in key.rights]
    chosen = next(iter([*admins, *keys]), None)
    return {"Authorization": f"Bearer {chosen.secret}"} if chosen else {}
