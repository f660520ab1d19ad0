"""Asking a server's admin routes: with keys they are not where the API is, but on the next port of its machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deltaserve.base.urls import admin_root, server_root
from deltaserve.server.settings import ApiKey, Right

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
    """None: it was not reached."""
    refusal: str = ""
    """Where it was looked for, what came of it, and what would help."""


def ask_admin(
    http: httpx.Client, path: str, base_url: str, admin_url: str | None, keys: Sequence[ApiKey]
) -> AdminAnswer:
    """GET `path` at `admin_url`; without one at `base_url`, and on its next port if it is not there."""
    tried, advice = [], _WHERE
    for root in [server_root(admin_url)] if admin_url else [server_root(base_url), admin_root(base_url)]:
        if root is None:
            continue
        try:
            reply = http.get(f"{root}{path}", headers=_bearer(keys))
            content = reply.json() if reply.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            tried.append(f"{root}{path}: {type(error).__name__}")
            continue
        if isinstance(content, dict):
            return AdminAnswer(content)
        tried.append(f"{root}{path}: HTTP {reply.status_code}")
        advice = _ADVICE.get(reply.status_code, _WHERE)
        if reply.status_code not in _ELSEWHERE:
            break
    return AdminAnswer(None, f"{', '.join(tried)}; {advice}")


def _bearer(keys: Sequence[ApiKey]) -> dict[str, str]:
    """The header with the first admin key, or the first key where none is one."""
    admins = [key for key in keys if Right.ADMIN in key.rights]
    chosen = next(iter([*admins, *keys]), None)
    return {"Authorization": f"Bearer {chosen.secret}"} if chosen else {}
