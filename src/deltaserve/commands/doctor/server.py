"""Checks of a running server: is it ready, and do its workers fit together."""

from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from deltaserve.commands.client.admin import AdminAnswer, ask_admin
from deltaserve.commands.client.http_client import fault, http_client
from deltaserve.control.cache.pages import is_crowded
from deltaserve.control.front.known_worker import STATE_WORDS
from deltaserve.control.peer.table import PeerState
from deltaserve.core.errors import ConfigError
from deltaserve.core.findings import Level, Line
from deltaserve.server.settings import ApiKey
from deltaserve.settings.urls import server_root

_TIMEOUT_S = 10.0
_UNFIT = "does not fit"
_WORDS = {state.value: word for state, word in STATE_WORDS.items()} | {
    PeerState.READY.value: "ready, but it has not reported yet"
}


def check_server(base_url: str, admin_url: str | None = None, keys: Sequence[ApiKey] = ()) -> Iterator[Line]:
    """Findings about the server at `base_url`; reads only. `admin_url`: where its admin routes are; None: there, or one
    port above."""
    url = server_root(base_url)
    try:
        with http_client(url, _TIMEOUT_S) as http:
            ready = http.get("/readyz")
        reasons = ready.json().get("reasons") or {}
        answer = ask_admin("/server_info", base_url, admin_url, keys)
    except ConfigError as error:
        yield Line(Level.FAIL, "server", str(error))
        return
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        yield Line(Level.FAIL, "server", fault(url, error))
        return
    if ready.status_code == httpx.codes.OK:
        yield Line(Level.OK, "server", f"{url}: ready")
    else:
        yield Line(Level.FAIL, "server", f"{url}: not ready: {'; '.join(map(str, reasons.values()))[:500]}")
    yield from _workers(answer)


def _workers(answer: AdminAnswer) -> Iterator[Line]:
    """What the admin routes say of them, or that they say nothing."""
    if answer.content is None:
        yield Line(Level.SKIP, "workers", f"not looked at: {answer.refusal}")
        return
    engine = answer.content.get("engine")
    if not isinstance(engine, dict):
        yield Line(Level.SKIP, "workers", "not looked at: what answers for the admin routes is not deltaserve")
        return
    for worker in engine["workers"]:
        yield _worker(worker)


def _worker(worker: dict[str, Any]) -> Line:
    """State, refusal, memory of one worker."""
    name, status = worker["name"], worker["status"]
    if worker["refusal"]:
        refusal = worker["refusal"][:500]
        return Line(Level.FAIL, "worker", f"{name}: {'' if refusal.startswith(_UNFIT) else f'{_UNFIT}: '}{refusal}")
    if worker["state"] != "ready" or status is None:
        return Line(Level.FAIL, "worker", f"{name}: {_WORDS.get(worker['state'], worker['state'])}")
    total, quarantined = sum(status["num_pages"]), sum(status["quarantined_pages"])
    free = sum(status["free_pages"]) + sum(status["evictable_pages"])
    text = f"{name}: fits, {status['num_running']} running, {free} of {total} pages free or evictable"
    if is_crowded(quarantined, total):
        return Line(Level.FAIL, "worker", f"{text}, {quarantined} quarantined")
    if status.get("metrics", {}).get("deltaserve_tier_slots") == 0:
        return Line(Level.WARN, "worker", f"{text}, without its file: where --cache-dir was is no place for it now")
    return Line(Level.WARN if status["draining"] or worker["breaker"] != "closed" else Level.OK, "worker", text)
