"""What the front keeps of bodies that were made to be kept: little, and no more after the first hundreds."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import httpx

from deltaserve.server.observe import MAX_REMEMBERED_SAMPLES, Recorder
from deltaserve.server.prometheus import ServerMetrics
from tests.patience import PATIENCE_S
from tests.server.child import child
from tests.server.corpus import COMPLETIONS, JSON, completion

_MIB = 1 << 20
NUM_FIRST, NUM_MORE, MOST_MIB = 60, 140, 48
"""Each body of a megabyte: kept, those of either part would be more than is allowed."""


def _text() -> str:
    return secrets.token_hex(_MIB // 2)


MAKERS: tuple[Callable[[], bytes], ...] = (
    lambda: completion({_text(): 1}),  # a name nobody knows
    lambda: completion({"stop": _text()}),
    lambda: completion({"model": _text()}),
    lambda: completion({"cache_salt": _text()}),
    lambda: completion({"prompt": _text()}),
    lambda: completion({"prompt": [[number % 200] for number in range(100_000)]}),
    lambda: completion({"logit_bias": {str(number): "x" * 50 for number in range(10_000)}}),
    lambda: json.dumps({"prompt": "x", "chat_template_kwargs": {_text(): 1}, _text()[:100]: [[]] * 1000}).encode(),
    lambda: b"{" + _text().encode(),
)


def test_hostile_bodies_leave_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    with child(model_folder, tmp_path) as front, httpx.Client(base_url=front.url, timeout=PATIENCE_S) as client:

        def send(num_bodies: int) -> float:
            for number in range(num_bodies):
                body = MAKERS[number % len(MAKERS)]()
                assert client.post(COMPLETIONS, content=body, headers=JSON).status_code in (200, 400, 404)
            return front.resident_mib()

        at_first = send(NUM_FIRST)
        assert send(NUM_MORE) - at_first < MOST_MIB


def test_remembered_requests_are_bounded_by_their_samples() -> None:
    recorder = Recorder(metrics=ServerMetrics.__new__(ServerMetrics))
    for number in range(100):
        recorder.remember(f"large-{number}", MAX_REMEMBERED_SAMPLES // 10, {"id": number})
    found = [number for number in range(100) if recorder.find(f"large-{number}") is not None]
    assert found == list(range(90, 100))
