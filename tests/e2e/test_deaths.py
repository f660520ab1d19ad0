"""Killed and stopped processes: clients are answered, the others serve on, the dead come back on the same port."""

import json
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import PATIENCE_S, Answer, Server, serving, wait_until
from tests.engine.server import is_alive, wait_until_gone

PAGE = 4
FLAGS = (
    "--page-size",
    str(PAGE),
    "--chunked-prefill-size",
    str(PAGE),
    "--num-pages",
    "2048",
    "--attention-split-tokens",
    "256",
)
LONG = random_prompt(3900, seed=7)
"""Computed and moved in 975 chunks, which takes some seconds."""
SHORT = random_prompt(3 * PAGE + 1, seed=8)
ANSWERED_S = 10.0
"""Bound for an answer after a death; it takes a tenth of a second, and about two where only silence tells."""


@pytest.fixture(scope="module")
def pair(tiny_models: Path) -> Iterator[Server]:
    """One server whose processes die one after the other."""
    with TemporaryDirectory(prefix="e2e-") as folder:
        with serving(Path(folder), tiny_models / "llama", *FLAGS, deaths=None) as server:
            yield server


class Asked:
    """A long request under way in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, ask: Callable[[], Answer]) -> None:
        self._future: Future[Answer] = pool.submit(ask)

    def is_done(self) -> bool:
        return self._future.done()

    def outcome(self) -> Answer | int:
        """The answer, or the status of the error."""
        try:
            return self._future.result(ANSWERED_S)
        except httpx.HTTPStatusError as error:
            return error.response.status_code

    def assert_answered(self, model: Path) -> None:
        """In time: either rightly, after a retry, or with the error that says that it may be sent again."""
        outcome = self.outcome()
        if isinstance(outcome, Answer):
            assert_true(model, LONG, outcome)
        else:
            assert outcome in (502, 503)


def in_the_middle(server: Server, pool: ThreadPoolExecutor, prompt: list[int]) -> Asked:
    """The request's pages are moving: prefill has sent some of them."""
    before = sent_bytes(server)
    asked = Asked(pool, lambda: server.complete(prompt, 4))
    wait_until(lambda: asked.is_done() or sent_bytes(server) > before, "the first chunks")
    assert not asked.is_done()
    return asked


def sent_bytes(server: Server) -> float:
    return sum(m.get("deltaserve_transfer_bytes_sent_total", 0.0) for m in server.metrics().values())


def stream_tokens(server: Server, prompt: list[int], max_tokens: int, on_token: Callable[[int], None]) -> list[int]:
    """Tokens of a stream; `on_token` hears how many there are so far. Raises RuntimeError for an error event."""
    body = server.body(prompt, max_tokens=max_tokens, stream=True, return_token_ids=True)
    tokens: list[int] = []
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["code"])
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            on_token(len(tokens))
    return tokens


def killing(server: Server, name: str) -> Callable[[int], None]:
    """Kills once ten tokens came."""
    victims = [name]

    def on_token(count: int) -> None:
        if count >= 10 and victims:
            server.signal(victims.pop(), signal.SIGKILL)

    return on_token


def wait_back(server: Server, name: str, starts: int = 2) -> None:
    """The worker was started again and everyone knows it."""
    wait_until(lambda: server.log().count(f"deltaserve: {name}: ready") >= starts, f"{name} to be back", server)
    wait_until(server.is_ready, "readiness", server)


def test_prefill_killed_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    """The client gets 502, a stream on decode goes on, and the next request uses the new prefill on the old port."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, deaths=1) as server, ThreadPoolExecutor(2) as pool:
        seen: list[int] = []
        running = pool.submit(stream_tokens, server, SHORT, 1000, seen.append)
        wait_until(lambda: bool(seen), "the first token")
        asked = in_the_middle(server, pool, LONG)
        server.signal("prefill-0", signal.SIGKILL)
        asked.assert_answered(model)
        assert not running.done()
        wait_back(server, "prefill-0")
        assert len(running.result(PATIENCE_S)) == 1000
        assert_true(model, LONG, server.complete(LONG, 4))
        assert_true(model, SHORT, server.complete(SHORT, 4))
        ports = {line.rpartition(":")[2] for line in server.log().splitlines() if "prefill-0: ready at" in line}
        assert len(ports) == 1


def test_prefill_killed_while_another_one_is_there(tiny_models: Path, folder: Path) -> None:
    """The request is retried there; the client sees an answer as if nothing had happened."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--prefill", "2", deaths=1) as server, ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(server, pool, LONG)
        busy = next(name for name, w in server.workers().items() if w["role"] == "prefill" and w["rooms"])
        server.signal(busy, signal.SIGKILL)
        outcome = asked.outcome()
        assert isinstance(outcome, Answer)
        assert_true(model, LONG, outcome)
        wait_back(server, busy)


def test_prefill_stopped_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    """Nobody is told: silence ends the request. When the process goes on it is greeted again and used."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS) as server, ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(server, pool, LONG)
        server.signal("prefill-0", signal.SIGSTOP)
        try:
            asked.assert_answered(model)
        finally:
            server.signal("prefill-0", signal.SIGCONT)
        wait_until(server.is_ready, "readiness", server)
        assert_true(model, LONG, server.complete(LONG, 4))


def test_decode_killed_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, deaths=1) as server, ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(server, pool, LONG)
        server.signal("decode-0", signal.SIGKILL)
        asked.assert_answered(model)
        wait_back(server, "decode-0")
        assert_true(model, LONG, server.complete(LONG, 4))


def test_decode_killed_in_the_middle_of_a_stream(tiny_models: Path, pair: Server) -> None:
    """One decode: the stream ends with an error event. Afterwards the prefix comes from prefill's cache alone."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, deaths=1) as server:
        with pytest.raises(RuntimeError) as caught:
            stream_tokens(server, SHORT, 2000, killing(server, "decode-0"))
        assert caught.value.args == ("transfer_failed",)
        wait_back(server, "decode-0")
        answer = server.complete(SHORT, 4)
        assert_true(model, SHORT, answer)
        assert answer.timings["decode_cached_tokens"] == 0
        assert answer.timings["prefill_cached_tokens"] == 3 * PAGE


def test_decode_killed_while_another_one_is_there(tiny_models: Path, folder: Path) -> None:
    """Before its first token a request goes on there. The client sees an answer as if nothing had happened."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, "--decode", "2", deaths=1) as server, ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(server, pool, LONG)
        busy = next(name for name, w in server.workers().items() if w["role"] == "decode" and w["rooms"])
        server.signal(busy, signal.SIGKILL)
        outcome = asked.outcome()
        assert isinstance(outcome, Answer)
        assert_true(model, LONG, outcome)
        wait_back(server, busy)


def test_front_killed(tiny_models: Path, pair: Server) -> None:
    """Its requests end on both workers, and the next front on the same port uses the same workers and caches."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, deaths=1) as server:
        server.complete(SHORT, 4)

        with pytest.raises(httpx.TransportError):
            stream_tokens(server, SHORT, 2000, killing(server, "front"))
        wait_back(server, "front")
        answer = server.complete(SHORT, 4)
        assert_true(model, SHORT, answer)
        assert answer.timings["decode_cached_tokens"] == 3 * PAGE


def test_supervisor_killed(tiny_models: Path, folder: Path) -> None:
    """Nothing outlives it."""
    server = Server(folder, tiny_models / "llama", *FLAGS)
    try:
        server.wait_ready()
        pids = server.pids()
    finally:
        server.http.close()
        server.kill()
    assert len(pids) == 4
    for pid in pids.values():
        wait_until_gone(pid)


def test_terminated_while_a_stream_runs(tiny_models: Path, folder: Path) -> None:
    """SIGTERM: readiness ends at once, the stream is finished, new requests are refused, exit code 0."""
    model = tiny_models / "llama"
    server = Server(folder, model, *FLAGS)
    with ThreadPoolExecutor(1) as pool:
        try:
            server.wait_ready()
            seen: list[int] = []
            running = pool.submit(stream_tokens, server, SHORT, 600, seen.append)
            wait_until(lambda: bool(seen), "the first token")
            server.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: not server.is_ready(), "the end of readiness")
            refused = server.http.post("/v1/completions", json=server.body(SHORT))
            assert refused.status_code == 503
            assert len(running.result(PATIENCE_S)) == 600
            assert server.popen.wait(PATIENCE_S) == 0
            assert all(line.endswith("exit code 0") for line in server.deaths())
            assert not any(is_alive(pid) for pid in server.pids().values())
        finally:
            server.http.close()
            server.kill()
