"""What the front keeps of bodies that were made to be kept: little, and no more after the first hundreds."""

import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
NUM_AT_ONCE, MOST_AT_ONCE_MIB = 24, 450
NUM_CUT, MOST_CUT_MIB = 150, 12
"""A connection with its request, its tasks and its answer is some 100 KiB."""


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


def test_bodies_of_many_values_are_read_one_after_the_other(model_folder: Path, tmp_path: Path) -> None:
    """Each becomes 70 MiB of texts; all of them at once are 700."""
    body = completion({"prompt": [f"{number:x}" for number in range(800_000)]})
    with child(model_folder, tmp_path) as front, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        at_first = front.resident_mib()

        def send(_: int) -> int:
            return httpx.post(front.url + COMPLETIONS, content=body, headers=JSON, timeout=PATIENCE_S).status_code

        assert set(threads.map(send, range(NUM_AT_ONCE))) == {400}
        assert front.peak_mib() - at_first < MOST_AT_ONCE_MIB


def test_streams_that_are_cut_leave_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    """Each client leaves with the first event of some hundreds."""
    body = completion({"stream": True, "max_tokens": 400, "n": 4})
    with child(model_folder, tmp_path) as front, httpx.Client(base_url=front.url, timeout=PATIENCE_S) as client:

        def cut(num_streams: int) -> float:
            for _ in range(num_streams):
                with client.stream("POST", COMPLETIONS, content=body, headers=JSON) as answer:
                    assert next(answer.iter_lines()).startswith("data: ")
            while client.get("/server_info").json()["requests"]:
                pass
            return front.resident_mib()

        at_first = cut(NUM_CUT)
        assert cut(3 * NUM_CUT) - at_first < MOST_CUT_MIB


def test_remembered_requests_are_bounded_by_their_samples() -> None:
    recorder = Recorder(ServerMetrics.__new__(ServerMetrics), "m")
    for number in range(100):
        recorder.remember(f"large-{number}", MAX_REMEMBERED_SAMPLES // 10, {"id": number})
    found = [number for number in range(100) if recorder.find(f"large-{number}") is not None]
    assert found == list(range(90, 100))
