"""Dynamo's frontend before a worker of `deltaserve dynamo`: its answers are those of the server behind it.

The command line is that of other clients; it ends with the Python that can run a server. Frontend, worker and servers
are started by the lines of docs/deploy.md, with other ports; they find each other by files in a folder, without etcd
and NATS. The standard library alone, beside the program.
"""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from tools.clients.harness import Check, Server, require, run_on
from tools.clients.page_lines import here, lines_with
from tools.clients.router_http import answer_of, events_of, free_port, post, texts_of, two_free_ports, until

_COLOURS = "fox red dog blue cat grey owl brown bee gold ant black "
_DOCUMENT = _COLOURS * 12
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_PAGE = 16
"""As on the page."""
_SECTION = "NVIDIA Dynamo"
_NUM_LEAVES = 5


@dataclass(slots=True)
class Deployment:
    """Processes of this run, all on loopback."""

    folder: Path
    server: Server
    python: str
    """That of the project, which can run a server."""
    log: TextIO

    def environment(self) -> dict[str, str]:
        """A folder where they find each other; nothing listens beyond this machine."""
        names = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
        found = {"DYN_FILE_KV": str(self.folder / "kv"), "DYN_LOG": "warn"}
        source = Path(__file__).resolve().parents[2] / "src"
        return os.environ | found | dict.fromkeys(names, "127.0.0.1") | {"PYTHONPATH": str(source)}

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """A program, with these surroundings."""
        return subprocess.Popen(argv, env=self.environment(), stdout=self.log, stderr=self.log)

    def start_frontend(self, port: int) -> subprocess.Popen[bytes]:
        """Dynamo's, for workers of this folder."""
        _, _, line = lines_with(_SECTION, "--base-url")
        return self._frontend(here(line, {"8000": port}))

    def start_worker(self, url: str) -> subprocess.Popen[bytes]:
        """The server at `url` as a worker."""
        _, line, _ = lines_with(_SECTION, "--base-url")
        return self.start(sys.executable, *_deltaserve(here(line, {"http://127.0.0.1:30000": url})))

    def start_server(self, port: int) -> subprocess.Popen[bytes]:
        """A server of this run's own."""
        line, _, _ = lines_with(_SECTION, "--base-url")
        return self._server(here(line, {"MODEL": self.server.path}), port)

    def start_kv_frontend(self, port: int) -> subprocess.Popen[bytes]:
        """Dynamo's, which asks where pages lie."""
        _, _, line = lines_with(_SECTION, "--router-mode")
        return self._frontend([*line, "--http-port", str(port)])

    def start_kv_worker(self, url: str, decode_events: int) -> subprocess.Popen[bytes]:
        """A worker that passes on what decode's cache holds."""
        _, line, _ = lines_with(_SECTION, "--router-mode")
        argv = _deltaserve(here(line, {"5558": decode_events}))
        return self.start(sys.executable, *argv, "--base-url", url)

    def start_kv_server(self, port: int, first_events: int) -> subprocess.Popen[bytes]:
        """A server that tells what its caches hold: prefill's on the first port, decode's on the next."""
        line, _, _ = lines_with(_SECTION, "--router-mode")
        return self._server(here(line, {"MODEL": self.server.path, "5557": first_events}), port)

    def _frontend(self, line: Sequence[str]) -> subprocess.Popen[bytes]:
        require(line[0] == "python", line)
        return self.start(sys.executable, *line[1:], "--http-host", "127.0.0.1")

    def _server(self, line: Sequence[str], port: int) -> subprocess.Popen[bytes]:
        return self.start(self.python, *_deltaserve(line), "--port", str(port))


def _deltaserve(line: Sequence[str]) -> list[str]:
    """The line of this program for a Python that may not have it installed."""
    require(line[0] == "deltaserve", line)
    return ["-m", "deltaserve.cli.main", *line[1:]]


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """It ends with this."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run the checks; ends the process."""
    server, (python,) = Server(*sys.argv[1:5]), sys.argv[5:]
    with tempfile.TemporaryDirectory() as path, ExitStack() as stack:
        log = stack.enter_context((Path(path) / "log").open("w"))
        deployment = Deployment(Path(path), server, python, log)
        port = free_port()
        stack.enter_context(ended(deployment.start_frontend(port)))
        url = _at(port)
        worker = stack.enter_context(ended(deployment.start_worker(server.url)))
        until(lambda: _names(url) == [server.model])
        run_on(replace(server, router=url), _checks(deployment, worker))


def _names(url: str | None) -> list[str]:
    try:
        with urllib.request.urlopen(f"{url}/v1/models") as reply:
            return [each["id"] for each in json.load(reply)["data"]]
    except OSError:
        return []


def _num_inside(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/get_load") as reply:
        return int(json.load(reply)[0]["num_reqs"])


def _chat_body(server: Server, **fields: object) -> dict[str, object]:
    greedy = {"temperature": 0, "max_tokens": 8, "skip_special_tokens": False}
    return {"model": server.model, "messages": [{"role": "user", "content": _DOCUMENT}], **greedy, **fields}


def _body(server: Server, **fields: object) -> dict[str, object]:
    """A prompt of ids, which the model goes on with by words."""
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return {"model": server.model, "prompt": [300, 301, 302], **greedy, **fields}


def _both(server: Server, path: str, body: Mapping[str, object]) -> tuple[Any, Any]:
    ours, own = answer_of(server.router, path, body), answer_of(server.url, path, body)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        require(ours["usage"][name] == own["usage"][name], (ours["usage"], own["usage"]))
    return ours, own


def _ends(answer: Any) -> list[str]:
    return [choice["finish_reason"] for choice in answer["choices"]]


def models(server: Server) -> None:
    require(_names(server.router) == [server.model], _names(server.router))


def chat(server: Server) -> None:
    ours, own = _both(server, _CHAT, _chat_body(server, ignore_eos=True))
    require(texts_of(ours) == texts_of(own) and _ends(ours) == ["length"], (ours, own))


def chat_stream(server: Server) -> None:
    options = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    events = events_of(server.router, _CHAT, _chat_body(server, **options))
    told = [choice for event in events for choice in event["choices"]]
    whole = answer_of(server.router, _CHAT, _chat_body(server, ignore_eos=True))
    require("".join(each["delta"].get("content") or "" for each in told) == texts_of(whole)[0], events)
    require([each["finish_reason"] for each in told if each.get("finish_reason")] == ["length"], events)
    require(events[-1]["usage"]["completion_tokens"] == 8, events[-1])


def chat_ends_by_itself(server: Server) -> None:
    """With the model's own end, which is no text."""
    body = _chat_body(server, max_tokens=64)
    ours, own = (answer_of(base, _CHAT, body) for base in (server.router, server.url))
    require(_ends(ours) == _ends(own) == ["stop"], (ours, own))
    require(ours["usage"]["completion_tokens"] == own["usage"]["completion_tokens"], (ours, own))


def completion_of_ids(server: Server) -> None:
    ours, own = _both(server, _COMPLETIONS, _body(server))
    require(texts_of(ours) == texts_of(own), (ours, own))


def completion_stream(server: Server) -> None:
    events = events_of(server.router, _COMPLETIONS, _body(server))
    told = "".join(choice["text"] for event in events for choice in event["choices"])
    require(told == texts_of(answer_of(server.url, _COMPLETIONS, _body(server)))[0], events)


def a_seed_and_logprobs(server: Server) -> None:
    body = _body(server, temperature=1, seed=3, logprobs=2)
    ours, own = _both(server, _COMPLETIONS, body)
    require(texts_of(ours) == texts_of(own), (ours, own))
    pairs = zip(*(answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (ours, own)), strict=True)
    require(all(abs(one - other) < 1e-3 for one, other in pairs), (ours, own))


def a_stop_string(server: Server) -> None:
    free = _body(server, temperature=1, seed=3, max_tokens=12, ignore_eos=False)
    words = texts_of(answer_of(server.url, _COMPLETIONS, free))[0].split()
    stop = next(word for word in words if word != words[0])
    ours, own = (answer_of(base, _COMPLETIONS, {**free, "stop": [stop]}) for base in (server.router, server.url))
    require(texts_of(ours) == texts_of(own) and _ends(ours) == ["stop"], (ours, own))


def structured_output(server: Server) -> None:
    ours, own = _both(server, _CHAT, _chat_body(server, guided_choice=["green apples", "red"], max_tokens=40))
    require(texts_of(ours) == texts_of(own), (ours, own))
    require(texts_of(ours)[0] in ("green apples", "red"), ours)


def cached_tokens_are_told(server: Server) -> None:
    body = _chat_body(server, ignore_eos=True)
    answer_of(server.router, _CHAT, body)
    usage = answer_of(server.router, _CHAT, body)["usage"]
    require(usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 48, usage)


@contextmanager
def _begun(server: Server, num_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A long completion, of which the first event has come."""
    body = _body(server, max_tokens=num_tokens, stream=True)
    with _sent(server, body) as connection, closing(connection.getresponse()) as reply:
        require(reply.readline().startswith(b"data: "), "no event")
        yield reply


@contextmanager
def _sent(server: Server, body: Mapping[str, object]) -> Iterator[http.client.HTTPConnection]:
    """A completion is asked for; its client has left behind this."""
    with closing(http.client.HTTPConnection(urlsplit(server.router or "").netloc)) as connection:
        connection.request("POST", _COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        yield connection


def a_stream_left_early_frees_the_request(server: Server) -> None:
    """Several times: how far Dynamo is with a stream that is left differs."""
    for _ in range(_NUM_LEAVES):
        with _being_left(server), _begun(server, 8000):
            until(lambda: _num_inside(server) == 1)


def a_request_left_before_its_first_token_is_freed(server: Server) -> None:
    for number in range(_NUM_LEAVES):
        prompt = random.Random(number).choices(range(300, 390), k=4000)
        with _being_left(server), _sent(server, _body(server, prompt=prompt, max_tokens=4000, stream=True)):
            until(lambda: _num_inside(server) == 1)


@contextmanager
def _being_left(server: Server) -> Iterator[None]:
    """The one request of this block ends in the server, by its client alone."""
    until(lambda: _num_inside(server) == 0)
    before = _cancelled(server)
    yield
    until(lambda: _num_inside(server) == 0)  # a front counts how a request ended before it has room for another
    require(_cancelled(server) == before + 1, (before, _cancelled(server)))


def _cancelled(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/server_info") as reply:
        return int(json.load(reply)["engine"]["counts"].get("failed_cancelled", 0))


def what_cannot_be_is_refused(server: Server) -> None:
    for fields, word in (
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"n": 2, "temperature": 1}, "n is not supported"),
        ({"guided_regex": "(("}, "regex"),
    ):
        status, text = post(f"{server.router}{_COMPLETIONS}", _body(server, **fields))
        require(status == 400 and word in text, (fields, status, text))
    answer_of(server.router, _COMPLETIONS, _body(server))


def _at(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _hit(server: Server, port: int, number: int) -> tuple[int, float, int]:
    """Who answered about a document, which share of it the router believed to be there, which tokens were."""
    document = random.Random(number).choices(range(300, 390), k=20 * _PAGE)
    body = _body(server, prompt=document, max_tokens=2, nvext={"extra_fields": ["worker_id", "timing"]})
    answer = answer_of(_at(port), _COMPLETIONS, body)
    told = answer["nvext"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(told["worker_id"]["decode_worker_id"]), float(told["timing"]["kv_hit_rate"]), int(cached)


def _is_believed(server: Server, port: int, number: int) -> bool:
    return _hit(server, port, number)[1] > 0


def _asked_workers(server: Server, port: int) -> set[int]:
    """Who answers about new documents."""
    if _names(_at(port)) != [server.model]:
        return set()
    return {_hit(server, port, random.randrange(10**6, 10**9))[0] for _ in range(4)}


def _checks(deployment: Deployment, worker: subprocess.Popen[bytes]) -> list[Check]:
    def a_worker_that_is_told_to_end_ends_its_streams(server: Server) -> None:
        with _begun(server, 2000) as reply:
            worker.send_signal(signal.SIGTERM)
            rest = reply.read().decode()
        require('"finish_reason":"length"' in rest and rest.rstrip().endswith("[DONE]"), rest[-200:])
        require(worker.wait() == 0, worker.returncode)
        until(lambda: not _names(server.router))
        status, text = post(f"{server.router}{_COMPLETIONS}", _body(server))
        require(status in (404, 503), (status, text))

    def a_killed_worker_and_its_restart(server: Server) -> None:
        with ended(deployment.start_worker(server.url)) as killed:
            until(lambda: _names(server.router) == [server.model])
            answer_of(server.router, _COMPLETIONS, _body(server))
        require(killed.returncode == -signal.SIGKILL, killed.returncode)
        status, text = post(f"{server.router}{_COMPLETIONS}", _body(server))
        require(status == 503, (status, text))
        with ended(deployment.start_worker(server.url)):
            until(lambda: post(f"{server.router}{_COMPLETIONS}", _body(server))[0] == 200)

    def a_server_that_goes_and_comes_back(server: Server) -> None:
        with ExitStack() as stack:
            port = free_port()
            url = _at(port)
            first = stack.enter_context(ended(deployment.start_server(port)))
            stack.enter_context(ended(deployment.start_worker(url)))
            until(lambda: post(f"{server.router}{_COMPLETIONS}", _body(server))[0] == 200)
            first.terminate()
            until(lambda: not _names(server.router))
            stack.enter_context(ended(deployment.start_server(port)))
            until(lambda: post(f"{server.router}{_COMPLETIONS}", _body(server))[0] == 200)

    def kv_routing_finds_the_pages(server: Server) -> None:
        apart = replace(deployment, folder=deployment.folder / "kv-routing")
        port = free_port()
        with ExitStack() as stack:
            for behind in (free_port(), free_port()):
                events = two_free_ports()
                stack.enter_context(ended(apart.start_kv_server(behind, events)))
                stack.enter_context(ended(apart.start_kv_worker(_at(behind), events + 1)))
            stack.enter_context(ended(apart.start_kv_frontend(port)))
            until(lambda: len(_asked_workers(server, port)) == 2)
            for number in range(6):
                until(partial(_is_believed, server, port, number))  # events are told ten times a second
                _, share, cached = _hit(server, port, number)
                require(share > 0 and cached > 0, (number, share, cached))

    plain: list[Check] = [models, chat, chat_stream, chat_ends_by_itself, completion_of_ids, completion_stream]
    plain += [a_seed_and_logprobs, a_stop_string, structured_output, cached_tokens_are_told]
    plain += [a_stream_left_early_frees_the_request, a_request_left_before_its_first_token_is_freed]
    plain += [what_cannot_be_is_refused]
    plain += [a_worker_that_is_told_to_end_ends_its_streams, a_killed_worker_and_its_restart]
    return [*plain, a_server_that_goes_and_comes_back, kv_routing_finds_the_pages]


if __name__ == "__main__":
    main()
