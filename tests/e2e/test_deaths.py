"""Killed and stopped processes: clients are answered, the others serve on, the dead come back and are found."""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import Answer, Api, Server, serving, wait_until
from tests.halting import halted
from tests.patience import PATIENCE_S
from tests.process.worker.server import wait_until_gone

PAGE = 4
MAX_TRIES = 20
FLAGS = ("--page-size", str(PAGE), "--chunked-prefill-size", str(PAGE), "--num-pages", "4096")


@pytest.fixture(scope="module")
def pair(tiny_models: Path) -> Iterator[Server]:
    """One server whose processes die one after the other."""
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), tiny_models / "llama", *FLAGS, deaths=None) as server,
    ):
        yield server


def long_prompt(seed: int) -> list[int]:
    """Computed and moved in 975 chunks, which takes some seconds."""
    return random_prompt(3900, seed=1000 + seed)


def short_prompt(seed: int) -> list[int]:
    """Three pages and one token."""
    return random_prompt(3 * PAGE + 1, seed=seed)


class Asked:
    """A long request under way in a thread."""

    def __init__(self, server: Api, pool: ThreadPoolExecutor, prompt: list[int]) -> None:
        self.prompt = prompt
        self._server = server
        self._sent_before = sent_bytes(server)
        self._future: Future[Answer] = pool.submit(server.complete, prompt, 4)

    def is_sending(self) -> bool:
        """Waits for a report of pages that prefill has sent; whether it came before the answer."""
        wait_until(lambda: self.is_answered() or sent_bytes(self._server) > self._sent_before, "the first chunks")
        return not self.is_answered()

    def is_answered(self) -> bool:
        return self._future.done()

    def assert_right(self, model: Path) -> None:
        """As if nothing had happened, though it may have waited for a worker."""
        assert_true(model, self.prompt, self._future.result(PATIENCE_S))


def in_the_middle(server: Api, pool: ThreadPoolExecutor, seed: int) -> Asked:
    """A long request whose pages are moving: prefill has sent some of them.

    Workers report twice a second: where a request takes less, several are tried until a report comes in the middle.
    """
    for number in range(MAX_TRIES):
        asked = Asked(server, pool, long_prompt(seed + 10 * number))
        if asked.is_sending():
            return asked
    raise AssertionError("no request takes long enough here to be met in its middle")


def sent_bytes(server: Api) -> float:
    return sum(m.get("deltaserve_transfer_bytes_sent_total", 0.0) for m in server.metrics().values())


def rooms_without_worker(server: Api) -> int:
    return int(server.info()["engine"]["rooms_without_worker"])


def busy(server: Server, role: str) -> list[str]:
    """Workers of that role that have a request."""
    return [name for name, worker in server.workers().items() if worker["role"] == role and worker["rooms"]]


def met_on(server: Server, pool: ThreadPoolExecutor, role: str, model: Path) -> tuple[Asked, str]:
    """A request in its middle, and the worker of that role that has it; others had left such workers before."""
    for number in range(MAX_TRIES):
        asked = in_the_middle(server, pool, 6 + 10 * MAX_TRIES * number)
        for name in busy(server, role):
            return asked, name
        asked.assert_right(model)
    raise AssertionError(f"no {role} worker had a request for long enough")


def stream_tokens(
    server: Api, prompt: list[int], max_tokens: int, on_token: Callable[[int], None], **fields: object
) -> list[int]:
    """Tokens of a stream; `on_token` hears how many there are so far. Raises RuntimeError for an error event."""
    body = server.body(prompt, max_tokens=max_tokens, stream=True, return_token_ids=True, **fields)
    tokens: list[int] = []
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
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


def killing(server: Server, name: str, after: int = 10) -> Callable[[int], None]:
    """Kills once so many tokens came."""
    victims = [name]

    def on_token(count: int) -> None:
        if count >= after and victims:
            server.signal(victims.pop(), signal.SIGKILL)

    return on_token


def test_prefill_killed_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    """The request waits for the new prefill and is answered; a stream on decode goes on."""
    model = tiny_models / "llama"
    with ThreadPoolExecutor(2) as pool:
        seen: list[int] = []
        running = pool.submit(stream_tokens, pair, short_prompt(1), 2500, seen.append)
        wait_until(lambda: bool(seen), "the first token")
        asked = in_the_middle(pair, pool, 1)
        pair.signal("prefill-0", signal.SIGKILL)
        asked.assert_right(model)
        pair.wait_back("prefill-0")
        assert len(running.result(PATIENCE_S)) == 2500
    assert_true(model, asked.prompt, pair.complete(asked.prompt, 4))


def waiting_for_prefill(server: Server, pool: ThreadPoolExecutor, model: Path) -> Asked:
    """A request in whose middle prefill stood still until it waited for a worker; it was answered in the end. Others
    had what they needed of prefill before."""
    for number in range(MAX_TRIES):
        asked = in_the_middle(server, pool, 2 + 10 * MAX_TRIES * number)

        def is_waiting() -> bool:
            return rooms_without_worker(server) == 1

        with halted(server.pid("prefill-0")):
            wait_until(lambda: is_waiting() or asked.is_answered(), "the request to wait for a worker")  # noqa: B023
            found = is_waiting()
        asked.assert_right(model)
        if found:
            return asked
    raise AssertionError("prefill was done with every request before it stood still")


def test_prefill_stopped_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    """Nobody is told: silence says it. The request waits until the process goes on, and is sent a Hello again and
    used."""
    model = tiny_models / "llama"
    with ThreadPoolExecutor(1) as pool:
        asked = waiting_for_prefill(pair, pool, model)
    wait_until(pair.is_ready, "readiness", pair)
    assert_true(model, asked.prompt, pair.complete(asked.prompt, 4))


def test_decode_killed_in_the_middle_of_a_transfer(tiny_models: Path, pair: Server) -> None:
    model = tiny_models / "llama"
    with ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(pair, pool, 3)
        pair.signal("decode-0", signal.SIGKILL)
        asked.assert_right(model)
    pair.wait_back("decode-0")
    assert_true(model, asked.prompt, pair.complete(asked.prompt, 4))


def test_decode_killed_in_the_middle_of_a_stream(tiny_models: Path, pair: Server) -> None:
    """The stream goes on behind what was delivered, when the worker is back: the client sees a pause."""
    prompt = short_prompt(4)
    undisturbed = stream_tokens(pair, prompt, 600, lambda count: None)
    assert stream_tokens(pair, prompt, 600, killing(pair, "decode-0")) == undisturbed
    pair.wait_back("decode-0")
    assert_true(tiny_models / "llama", prompt, pair.complete(prompt, 4))


def test_decode_killed_in_the_middle_of_an_answer_by_a_grammar(pair: Server) -> None:
    """The next life replays what was delivered: the answer is valid, and the one that nobody disturbed."""
    item = {"type": "object", "properties": {"é": {"enum": ["ja", "nein"]}, "n": {"type": "integer", "maximum": 99}}}
    numbers = {**item, "required": ["é", "n"], "additionalProperties": False}
    schema = {"type": "array", "items": {"anyOf": [numbers, {"type": "string", "maxLength": 8}]}, "minItems": 60}
    wanted = {"json": {**schema, "maxItems": 61}, "disable_any_whitespace": True}
    fields = {"structured_outputs": wanted, "temperature": 1.0, "seed": 7}
    undisturbed = stream_tokens(pair, short_prompt(6), 3000, lambda count: None, **fields)
    assert stream_tokens(pair, short_prompt(6), 3000, killing(pair, "decode-0"), **fields) == undisturbed
    value = json.loads(bytes(token for token in undisturbed if token < 256).decode())
    assert 60 <= len(value) <= 61
    pair.wait_back("decode-0")


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_request_that_comes_while_the_only_worker_starts_again(tiny_models: Path, pair: Server, name: str) -> None:
    """It waits for the worker, as one does that was there before."""
    prompt = short_prompt(6)
    num_deaths = len(pair.deaths())
    pair.signal(name, signal.SIGKILL)
    wait_until(lambda: len(pair.deaths()) > num_deaths, "the death to be told", pair)
    assert_true(tiny_models / "llama", prompt, pair.complete(prompt, 4))
    pair.wait_back(name)


def num_without_prefill(server: Api) -> int:
    """Requests that decode has computed since no prefill worker could."""
    return int(server.info()["engine"]["counts"].get("without_prefill", 0))


@contextmanager
def left_by_prefill(server: Server, pool: ThreadPoolExecutor, model: Path) -> Iterator[int]:
    """Prefill stands still while this lasts, since the middle of a request that decode computed then and answered: how
    many it had computed so before. Other requests had what they needed of prefill before."""
    for number in range(MAX_TRIES):
        asked = in_the_middle(server, pool, 7 + 10 * MAX_TRIES * number)
        before = num_without_prefill(server)
        with halted(server.pid("prefill-0")):
            asked.assert_right(model)
            if num_without_prefill(server) > before:
                yield before
                return
        wait_until(lambda: server.workers()["prefill-0"]["state"] == "ready", "prefill to be used again", server)
    raise AssertionError("prefill was done with every request before it stood still")


def test_without_prefill_decode_computes_prompts(tiny_models: Path, folder: Path) -> None:
    """Where it may: what prefill was to compute when it stopped, and what comes before it goes on."""
    model = tiny_models / "llama"
    weighing = ("--conditional-prefill", "auto", "--itl-target-ms", "1000", "--decode-extend-tokens", "4")
    with serving(folder, model, *FLAGS, *weighing, deaths=1) as server, ThreadPoolExecutor(1) as pool:
        with left_by_prefill(server, pool, model) as before:
            for seed in range(20, 23):
                answer = server.complete(random_prompt(200, seed), 4)
                assert_true(model, random_prompt(200, seed), answer)
                assert answer.timings["transferred_bytes"] == 0
            assert server.is_ready()
            assert num_without_prefill(server) == before + 4
            server.signal("prefill-0", signal.SIGKILL)
        server.wait_back("prefill-0")
        wait_until(lambda: server.workers()["prefill-0"]["state"] == "ready", "prefill to be used again", server)
        answer = server.complete(random_prompt(200, 30), 4)
        assert_true(model, random_prompt(200, 30), answer)
        assert answer.timings["transferred_bytes"] > 0


def is_whole(server: Server, prompt: list[int], on_token: Callable[[int], None]) -> bool:
    """Whether a stream ends as it should, and not with its connection."""
    try:
        return len(stream_tokens(server, prompt, 4000, on_token)) == 4000
    except httpx.TransportError:
        return False


def test_front_killed(tiny_models: Path, pair: Server) -> None:
    """Its requests end on both workers, and the next front on the same port uses the same workers and caches."""
    prompt = short_prompt(5)
    pair.complete(prompt, 4)
    while is_whole(pair, prompt, killing(pair, "front", after=1)):
        pair.wait_back("front")  # it had sent all of it before it was killed
    pair.wait_back("front")
    pair.wait_quiet()
    answer = pair.complete(prompt, 4)
    assert_true(tiny_models / "llama", prompt, answer)
    assert answer.timings["decode_cached_tokens"] == 3 * PAGE


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def test_killed_while_another_one_is_there(tiny_models: Path, folder: Path, role: str) -> None:
    """Before its first token a request goes on there. The client sees an answer as if nothing had happened."""
    model = tiny_models / "llama"
    with serving(folder, model, *FLAGS, f"--{role}", "2", deaths=1) as server, ThreadPoolExecutor(1) as pool:
        asked, victim = met_on(server, pool, role, model)
        server.signal(victim, signal.SIGKILL)
        asked.assert_right(model)
        server.wait_back(victim)


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
