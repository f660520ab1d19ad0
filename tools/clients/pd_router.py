"""A router of SGLang's kind in P/D mode, before a prefill and a decode worker: its answers are those of the server.

The router is started by its line of docs/deploy.md. The command line is that of other clients, and behind it what
`serving.halves` tells: the API of prefill, the port of its links, its process, the API of decode. Nothing beside the
standard library: it runs by the router's own Python.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.clients.harness import Check, Server, require, run_on
from tools.clients.page_lines import here, line_with
from tools.clients.router_http import answer_of, events_of, post, status_of, texts_of, until

_COLOURS = "fox red dog blue cat grey owl brown bee gold ant black "
_DOCUMENT = _COLOURS * 12
_GREEDY = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
"""The model's words are special tokens."""
_PROGRAM = ("python", "-m", "sglang_router.launch_router")
"""On the page."""
_AS_THEY_COME = ("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker")
"""It tries nothing again, so that what a worker says is seen."""
_SAMPLING = {**_GREEDY, "max_new_tokens": 8}


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers behind the router."""

    prefill: str
    link_port: str
    prefill_pid: str
    decode: str


def main(command: Sequence[str]) -> None:
    """Run the checks with the router that `command` starts; ends the process."""
    pair, server = Pair(*sys.argv[5:]), Server(*sys.argv[1:5])
    with _routing(command, pair) as url:
        run_on(replace(server, router=url), [as_the_page_starts_it])
    with _routing(command, pair, *_AS_THEY_COME) as url:
        run_on(replace(server, router=url), _checks(pair))


@contextmanager
def _routing(command: Sequence[str], pair: Pair, *flags: str) -> Iterator[str]:
    """The router, ready: by the page's line, with the addresses that are free here."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics))
    workers = {"http://127.0.0.1:30001": pair.prefill, "8998": pair.link_port, "http://127.0.0.1:30002": pair.decode}
    line = here(line_with("SGLang's P/D mode", *_PROGRAM), workers)
    argv = [*command, *line[len(_PROGRAM) :], *where, *flags]
    router = subprocess.Popen(argv, stdout=sys.stderr, stderr=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: status_of(f"{url}/readiness") == 200)
        yield url
    finally:
        router.kill()
        router.wait()


def _both(server: Server, path: str, body: Mapping[str, object]) -> tuple[Any, Any]:
    """The router's answer, and the server's own."""
    return answer_of(server.router, path, body), answer_of(server.url, path, body)


def models(server: Server) -> None:
    with urllib.request.urlopen(f"{server.router}/v1/models") as reply:
        found = json.load(reply)["data"]
    require([each["id"] for each in found] == [server.model], found)


def as_the_page_starts_it(server: Server) -> None:
    models(server)
    chat(server)


def chat(server: Server) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": _COLOURS}], "max_tokens": 8, **_GREEDY}
    ours, own = _both(server, "/v1/chat/completions", body)
    require(texts_of(ours) == texts_of(own), (ours, own))
    require(ours["usage"]["completion_tokens"] == 8, ours)


def chat_with_several_answers(server: Server) -> None:
    messages = [{"role": "user", "content": _COLOURS}]
    body = {"model": server.model, "messages": messages, "max_tokens": 8, "n": 3, "seed": 5, **_GREEDY}
    body["temperature"] = 1
    ours, own = _both(server, "/v1/chat/completions", body)
    require(len(texts_of(ours)) == 3, ours)
    require(texts_of(ours) == texts_of(own), (ours, own))


def chat_stream(server: Server) -> None:
    messages = [{"role": "user", "content": _COLOURS}]
    body = {"model": server.model, "messages": messages, "max_tokens": 8, **_GREEDY}
    told = [
        "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        for events in (events_of(base, "/v1/chat/completions", body) for base in (server.router, server.url))
    ]
    require(told[0] == told[1] and told[0], told)


def completions_of_a_list(server: Server) -> None:
    body = {"model": server.model, "prompt": [_COLOURS, "fox", _DOCUMENT], "max_tokens": 8, **_GREEDY}
    ours, own = _both(server, "/v1/completions", body)
    require(len(texts_of(ours)) == 3, ours)
    require(texts_of(ours) == texts_of(own), (ours, own))


def completion_stream(server: Server) -> None:
    body = {"model": server.model, "prompt": _DOCUMENT, "max_tokens": 8, **_GREEDY}
    told = [
        "".join(choice["text"] for event in events for choice in event["choices"])
        for events in (events_of(base, "/v1/completions", body) for base in (server.router, server.url))
    ]
    require(told[0] == told[1] and told[0], told)


def generate_with_logprobs_of_the_prompt(server: Server) -> None:
    """Routers add prefill's to decode's: there must be as many as tokens, once."""
    body = {"text": _COLOURS, "sampling_params": _SAMPLING, "return_logprob": True, "logprob_start_len": 0}
    ours, own = _both(server, "/generate", body)
    require(ours["output_ids"] == own["output_ids"], (ours, own))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        told, expected = ours["meta_info"][name], own["meta_info"][name]
        require([each[1] for each in told] == [each[1] for each in expected], (told, expected))


def generate_of_a_batch(server: Server) -> None:
    body = {"input_ids": [[270, 280, 290], [300, 310, 320, 330]], "sampling_params": _SAMPLING}
    ours, own = _both(server, "/generate", body)
    require([each["output_ids"] for each in ours] == [each["output_ids"] for each in own], (ours, own))


def only_the_delta_moves(server: Server) -> None:
    def moved(last: str) -> tuple[int, int]:
        body = {"text": f"{_DOCUMENT}{last}", "sampling_params": {**_SAMPLING, "max_new_tokens": 2}}
        found = answer_of(server.router, "/generate", body)["meta_info"]
        return found["prompt_tokens"], found["cached_tokens_details"]["decode"]

    moved("cow white")
    tokens, cached = moved("cow green")
    require(tokens - 48 < cached < tokens, (tokens, cached))


def many_at_once(server: Server) -> None:
    def ask(base: str | None, number: int) -> Any:
        body = {"text": f"{_COLOURS}{number}", "sampling_params": _SAMPLING}
        return answer_of(base, "/generate", body)["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        ours = list(pool.map(lambda number: ask(server.router, number), range(24)))
    require(ours == [ask(server.url, number) for number in range(24)], ours)


def a_bad_body_is_refused(server: Server) -> None:
    body = {"model": server.model, "prompt": "fox", "max_tokens": 10**6}
    status, text = post(f"{server.router}/v1/completions", body)
    require(status == 400 and "max_tokens" in text, (status, text))


def _checks(pair: Pair) -> list[Check]:
    def a_killed_prefill_worker(server: Server) -> None:
        body = {"text": f"{_DOCUMENT}elk", "sampling_params": _SAMPLING}
        own = answer_of(server.url, "/generate", body)["output_ids"]
        worker = _worker_of(int(pair.prefill_pid))
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, f"{server.router}/generate", body)
            until(lambda: _num_inside(pair.prefill) and _num_inside(pair.decode))
            os.kill(worker, signal.SIGKILL)
            status, text = asked.result()
        require(status >= 500, (status, text))
        until(lambda: post(f"{server.router}/generate", body)[0] == 200)
        require(answer_of(server.router, "/generate", body)["output_ids"] == own, own)

    plain: list[Check] = [models, chat, chat_with_several_answers, chat_stream, completions_of_a_list]
    plain += [completion_stream, generate_with_logprobs_of_the_prompt, generate_of_a_batch, only_the_delta_moves]
    return [*plain, many_at_once, a_bad_body_is_refused, a_killed_prefill_worker]


def _num_inside(base: str) -> int:
    """Requests that a worker has."""
    with urllib.request.urlopen(f"{base}/get_load") as reply:
        return int(json.load(reply)[0]["num_reqs"])


def _worker_of(supervisor: int) -> int:
    """The process that computes, of those that a `prefill --http` started."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    (worker,) = (each for each in children if b"process.worker.worker" in Path(f"/proc/{each}/cmdline").read_bytes())
    return int(worker)
