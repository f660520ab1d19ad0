"""Checks of a running server: is it ready, and do its workers fit together."""

from collections.abc import Iterator
from typing import Any

import httpx

from deltaserve.base.urls import server_root
from deltaserve.cache.pages import MAX_QUARANTINED_SHARE
from deltaserve.cli.doctor_report import Level, Line
from deltaserve.peer.table import PeerState
from deltaserve.routing.workers import STATE_WORDS

_TIMEOUT_S = 10.0
_WORDS = {state.value: word for state, word in STATE_WORDS.items()} | {
    PeerState.READY.value: "ready, but it has not reported yet"
}


def check_server(base_url: str) -> Iterator[Line]:
    """Of `base_url`; reads only."""
    url = server_root(base_url)
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http:
            ready, info = http.get("/readyz"), http.get("/server_info")
            reasons = ready.json().get("reasons") or {}
            content = info.json() if info.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        yield Line(Level.FAIL, "server", f"{url}: {type(error).__name__}: {str(error)[:200]}")
        return
    if ready.status_code == httpx.codes.OK:
        yield Line(Level.OK, "server", f"{url}: ready")
    else:
        yield Line(Level.FAIL, "server", f"{url}: not ready: {'; '.join(map(str, reasons.values()))[:500]}")
    if not isinstance(content, dict):
        text = f"{url}/server_info: HTTP {info.status_code}; with keys it is on the admin port, the next one"
        yield Line(Level.WARN, "workers", text)
        return
    for worker in content["engine"]["workers"]:
        yield _worker(worker)


def _worker(worker: dict[str, Any]) -> Line:
    """State, refusal, memory of one worker."""
    name, status = worker["name"], worker["status"]
    if worker["refusal"]:
        return Line(Level.FAIL, "worker", f"{name}: does not fit: {worker['refusal'][:500]}")
    if worker["state"] != "ready" or status is None:
        return Line(Level.FAIL, "worker", f"{name}: {_WORDS.get(worker['state'], worker['state'])}")
    total, quarantined = sum(status["num_pages"]), sum(status["quarantined_pages"])
    free = sum(status["free_pages"]) + sum(status["evictable_pages"])
    text = f"{name}: fits, {status['num_running']} running, {free} of {total} pages free or evictable"
    if quarantined > MAX_QUARANTINED_SHARE * total:
        return Line(Level.FAIL, "worker", f"{text}, {quarantined} quarantined")
    return Line(Level.WARN if status["draining"] or worker["breaker"] != "closed" else Level.OK, "worker", text)
