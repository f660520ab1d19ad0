"""What is counted of a request, however it ends: docs/operations.md, "When a counter moves", on a real server."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import httpx
import pytest

from tests.e2e.server import ROOT, Json, Server, serving, wait_until
from tests.halting import halted
from tests.patience import PATIENCE_S

MODEL = ROOT / "models" / "recall-micro"
PAGE = 16
FLAGS = ("--page-size", str(PAGE), "--num-pages", "2048", "--context-length", "8192")
LONG = 7900
"""Output tokens that nobody waits for."""
MAX_TRIES = 20
PROMPT_LEN = 5 * PAGE + 1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-") as folder, serving(Path(folder), MODEL, *FLAGS) as started:
        yield started


def counted(server: Server) -> dict[str, float]:
    """Counters of the front by name and label."""
    text = server.http.get("/metrics").text
    found = re.findall(r"^deltaserve_(\w+?)(?:_total)?(?:\{\w+=\"(\w+)\"\})? (\S+)$", text, re.MULTILINE)
    return {f"{name} {label}".rstrip(): float(value) for name, label, value in found}


def body(server: Server, number: int, **fields: object) -> Json:
    """Each with a prompt of its own: the one of a row is known to no cache but by what its row did."""
    prompt = [32 + (number * 7 + place) % 64 for place in range(PROMPT_LEN)]
    return server.body(prompt, **{"max_tokens": 3, **fields})


@dataclass(frozen=True, slots=True)
class Ended:
    """What the client saw: how its requests ended, and how many prompts had a token, so were computed."""

    outcomes: dict[str, int]
    prompts: int


def whole(server: Server, asked: Json) -> Ended:
    assert server.http.post("/v1/completions", json=asked).status_code == 200
    return Ended({"ok": 1}, 1)


def stopped(server: Server, asked: Json) -> Ended:
    """By a stop string, in the middle of a long answer."""
    text = server.http.post("/v1/completions", json={**asked, "max_tokens": 8}).json()["choices"][0]["text"]
    long = {**asked, "max_tokens": LONG, "stop": text[3:5], "cache_salt": "again"}
    assert server.http.post("/v1/completions", json=long).json()["choices"][0]["finish_reason"] == "stop"
    return Ended({"ok": 2}, 2)


def cut(server: Server, asked: Json) -> Ended:
    """The client leaves when it has some tokens, and others are still to come: else it asks again."""
    url, long = f"{server.base_url}/v1/completions", asked | {"max_tokens": LONG, "stream": True}
    for num_whole in range(MAX_TRIES):
        with httpx.stream("POST", url, json=long, timeout=PATIENCE_S) as reply:
            lines = filter(None, reply.iter_lines())
            for _ in range(3):
                next(lines)
            with halted(server.pid("decode-0")):
                if server.info()["engine"]["rooms"]:
                    reply.close()
                    wait_until(lambda: server.info()["engine"]["rooms"] == 0, "the request to be given up", server)
                    return Ended({"client_gone": 1} | ({"ok": num_whole} if num_whole else {}), 1 + num_whole)
    raise AssertionError("no answer takes long enough here to be left in its middle")


def late(server: Server, asked: Json) -> Ended:
    """Its deadline passes behind its first token: the first deadline for which that is so."""
    for tries in range(1, 10):
        headers = {"x-deadline-seconds": str(0.1 * 2**tries)}
        reply = server.http.post(
            "/v1/completions", json=asked | {"max_tokens": LONG, "stream": True, "n": 4}, headers=headers
        )
        assert "deadline_exceeded" in reply.text
        begun = {index for index in range(4) if f'"index":{index},"text":"' in reply.text}
        if begun:
            return Ended({"deadline_exceeded": tries}, len(begun))
    raise AssertionError("no deadline was long enough for a token")


def refused(server: Server, asked: Json) -> Ended:
    """The engine never hears of it."""
    assert server.http.post("/v1/completions", json=asked | {"max_tokens": 8192}).status_code == 400
    return Ended({}, 0)


ENDINGS: tuple[Callable[[Server, Json], Ended], ...] = (whole, stopped, cut, late, refused)


@pytest.mark.parametrize("end", ENDINGS)
def test_what_an_ending_counts(server: Server, end: Callable[[Server, Json], Ended]) -> None:
    server.wait_quiet()
    before = counted(server)
    ended = end(server, body(server, ENDINGS.index(end)))
    server.wait_quiet()
    moved = {key: value - before.get(key, 0.0) for key, value in counted(server).items()}

    def of(counter: str) -> dict[str, float]:
        found = {key.partition(" ")[2]: value for key, value in moved.items() if key.partition(" ")[0] == counter}
        return {label: value for label, value in found.items() if value}

    assert of("requests") == ended.outcomes
    assert moved["prompt_tokens"] == ended.prompts * PROMPT_LEN
    assert moved["e2e_request_latency_seconds_count"] == ended.outcomes.get("ok", 0)
    assert (moved["generation_tokens"] > 0) is (ended.prompts > 0)
    assert of("request_errors") == {code: count for code, count in ended.outcomes.items() if code != "ok"}


@pytest.mark.parametrize("end", [whole, cut])
def test_hits_count_alike_whether_the_answer_is_taken_or_not(
    server: Server, end: Callable[[Server, Json], Ended]
) -> None:
    asked = body(server, 20 + len(end.__name__), cache_salt=end.__name__)
    whole(server, asked)
    server.wait_quiet()
    before = counted(server)
    ended = end(server, asked)
    server.wait_quiet()
    after = counted(server)
    hits = {side: after[f"cached_tokens {side}"] - before[f"cached_tokens {side}"] for side in ("decode", "prefill")}
    assert hits["decode"] >= ended.prompts * (PROMPT_LEN - PAGE)
    assert after["prompt_tokens"] - before["prompt_tokens"] == ended.prompts * PROMPT_LEN


@contextmanager
def two_under_way(server: Server) -> Iterator[dict[str, float]]:
    """Two answers of one request are there while this lasts, since decode stands still until the client has its answer:
    what the counters have moved by since it asked. Where all came before that, it asks again."""
    asked = body(server, 1, max_tokens=LONG, stream=True, n=2)
    for _ in range(MAX_TRIES):
        before = counted(server)
        client = Thread(target=lambda: httpx.post(f"{server.base_url}/v1/completions", json=asked, timeout=PATIENCE_S))
        client.start()
        while client.is_alive() and counted(server)["num_requests_running"] != 2:
            pass
        with halted(server.pid("decode-0")):
            seen = counted(server)
            if seen["num_requests_running"] == 2:
                yield {key: value - before.get(key, 0.0) for key, value in seen.items()}
                client.join()
                return
        client.join()
    raise AssertionError("no answer takes long enough here to be met in its middle")


def test_what_an_operator_ends_is_counted_when_it_is_computed(folder: Path) -> None:
    """The end of the grace cuts what runs: prompt and tokens were counted when they came, not at the end."""
    flags = ("--shutdown-grace-s", "0.1", "--log-dir", str(folder / "logs"))
    with serving(folder, MODEL, *FLAGS, *flags, deaths=None) as server:
        with two_under_way(server) as moved:
            assert moved["prompt_tokens"] == 2 * PROMPT_LEN
            assert moved["generation_tokens"] > 0
            server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(PATIENCE_S) == 0
    lines = "\n".join(path.read_text() for path in (folder / "logs").glob("front*"))
    assert re.search(r'"outcome": "not_ready"', lines)
