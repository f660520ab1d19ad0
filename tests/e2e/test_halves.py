"""SGLang's P/D dialect: every request goes to a prefill and a decode worker at once, and one of them answers it.

The requests are those that sglang-router and smg send, as they send them. Both routers, unmodified, are in front of
such a pair in `make clients`.
"""

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import httpx
import pytest

from tests.e2e.halves import HalfWorker, Halves, halves
from tests.e2e.questions import RECALL_MODEL, AskedDocument, ask_about
from tests.e2e.reference import MAX_PAYLOAD_BYTES, moved_bytes
from tests.e2e.server import Api, Json, wait_until
from tests.halting import halted

ANSWER_LEN = 6
MAX_TRIES = 20
_PREFILL, _DECODE = 0, 1


@pytest.fixture(scope="module")
def pair() -> Iterator[Halves]:
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder,
        halves(Path(folder), RECALL_MODEL) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def own(pair: Halves) -> Api:
    return pair.own_front()


@pytest.fixture(scope="module")
def asked() -> list[AskedDocument]:
    return ask_about(num_documents=2, num_questions=3, answer_len=ANSWER_LEN, seed=5)


def completion(prompt: object, **fields: object) -> Json:
    return {"prompt": prompt, "max_tokens": ANSWER_LEN, "temperature": 0, "return_token_ids": True, **fields}


def tokens_of(reply: httpx.Response) -> list[list[int]]:
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def events_of(reply: httpx.Response) -> list[Json]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def assert_done(prefill: httpx.Response) -> None:
    """Prefill says that its part is done, and nothing that a router would add to the answer."""
    assert prefill.status_code == 200, prefill.text
    bodies = prefill.json() if isinstance(prefill.json(), list) else [prefill.json()]
    for body in bodies:
        assert body["text"] == ""
        assert body["meta_info"]["prompt_tokens"] > 0
        assert "input_token_logprobs" not in body["meta_info"]


def error_of(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


# ---------------------------------------------------------------- answers


def test_answers_are_right_and_the_delta_moves(pair: Halves, asked: list[AskedDocument]) -> None:
    moved = cached = 0
    for one in asked:
        prefill, decode = pair.both("/v1/completions", {**completion(one.prompt, timings=True), **pair.place()})
        assert_done(prefill)
        assert tokens_of(decode) == [one.answer]
        times = decode.json()["usage"]["timings"][0]
        hit = times["decode_cached_tokens"]
        beside = times["transferred_bytes"] - moved_bytes(RECALL_MODEL, 16, len(one.prompt), hit)
        assert 0 <= beside <= MAX_PAYLOAD_BYTES
        moved, cached = moved + times["transferred_bytes"], cached + hit
    without_cache = sum(moved_bytes(RECALL_MODEL, 16, len(one.prompt), 0) for one in asked)
    assert cached > 0
    assert moved < without_cache, "a document that decode has is not moved again"


def test_a_list_of_prompts_has_a_room_each(pair: Halves, own: Api, asked: list[AskedDocument]) -> None:
    body = completion([one.prompt for one in asked])
    prefill, decode = pair.both("/v1/completions", {**body, **pair.places(len(asked))})
    assert_done(prefill)
    assert tokens_of(decode) == [one.answer for one in asked]
    assert tokens_of(decode) == tokens_of(own.http.post("/v1/completions", json=body))


def test_one_room_may_stand_for_all_answers(pair: Halves, own: Api, asked: list[AskedDocument]) -> None:
    body = completion(asked[0].prompt, n=2, temperature=1, seed=3, ignore_eos=True)
    prefill, decode = pair.both("/v1/completions", {**body, **pair.place()})
    assert_done(prefill)
    assert tokens_of(decode) == tokens_of(own.http.post("/v1/completions", json=body))


def test_a_stream_is_that_of_our_own_front(pair: Halves, own: Api, asked: list[AskedDocument]) -> None:
    body = completion(asked[0].prompt, stream=True)
    prefill, decode = pair.both("/v1/completions", {**body, **pair.place()})
    assert_done(prefill)

    def told(reply: httpx.Response) -> list[int]:
        return [token for event in events_of(reply) for token in event["choices"][0]["token_ids"]]

    assert told(decode) == asked[0].answer == told(own.http.post("/v1/completions", json=body))


def test_chats_with_several_answers_have_a_room_each(pair: Halves, own: Api) -> None:
    body = {"messages": [{"role": "user", "content": "fox red"}], "max_tokens": 5, "n": 2, "seed": 7}
    prefill, decode = pair.both("/v1/chat/completions", {**body, "ignore_eos": True, **pair.places(2)})
    assert_done(prefill)
    told = [choice["message"] for choice in decode.json()["choices"]]
    reply = own.http.post("/v1/chat/completions", json={**body, "ignore_eos": True})
    assert told == [choice["message"] for choice in reply.json()["choices"]]


def test_generate_with_logprobs_of_the_prompt(pair: Halves, own: Api, asked: list[AskedDocument]) -> None:
    sampling = {"max_new_tokens": ANSWER_LEN, "temperature": 0}
    body = {"input_ids": asked[0].prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    prefill, decode = pair.both("/generate", {**body, **pair.place()})
    assert_done(prefill)
    mine = own.http.post("/generate", json=body).json()
    assert decode.json()["output_ids"] == mine["output_ids"] == asked[0].answer
    told = decode.json()["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in told] == asked[0].prompt
    for (ours, *_), (theirs, *_) in zip(told[1:], mine["meta_info"]["input_token_logprobs"][1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


# ---------------------------------------------------------------- what routers ask beside


def test_routers_find_what_they_read(pair: Halves) -> None:
    for half in (pair.prefill, pair.decode):
        info = half.http.get("/server_info").json()
        assert info["disaggregation_mode"] == half.role
        assert info["served_model_name"] == RECALL_MODEL.name
        assert info["model_path"] == str(RECALL_MODEL)
        assert (info["tp_size"], info["dp_size"]) == (1, 1)
        assert info["max_running_requests"] > 0
        assert info["disaggregation_bootstrap_port"] == half.link_port
        for path in ("/health", "/health_generate", "/v1/models", "/get_model_info", "/v1/loads"):
            assert half.http.get(path).status_code == 200, path
        assert half.http.get("/get_load").json()[0]["num_reqs"] == 0
        (model,) = half.http.get("/v1/models").json()["data"]
        assert (model["id"], model["owned_by"]) == (RECALL_MODEL.name, "sglang")


# ---------------------------------------------------------------- bad bodies


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bootstrap_host": None}, "bootstrap_host is missing"),
        ({"bootstrap_port": None}, "prefill's --disaggregation-bootstrap-port"),
        ({"bootstrap_room": None}, "bootstrap_room is missing"),
        ({"bootstrap_room": []}, "bootstrap_room is missing"),
        ({"bootstrap_room": -1}, "bootstrap_room is -1"),
        ({"bootstrap_room": True}, "bootstrap_room is True"),
        ({"bootstrap_room": "7"}, "bootstrap_room is '7'"),
        ({"bootstrap_room": 1 << 64}, "bootstrap_room is 18446744073709551616"),
        ({"bootstrap_room": [1, 2, 3]}, "the request has 1 prompts and 1 answers"),
        ({"bootstrap_room": [1, 2], "bootstrap_port": [1]}, "lists of different lengths"),
        ({"bootstrap_port": 0}, "bootstrap_port is 0"),
        ({"bootstrap_port": 65536}, "bootstrap_port is 65536"),
        ({"bootstrap_port": 1.5}, "bootstrap_port is 1.5"),
        ({"bootstrap_host": "a b"}, "bootstrap_host is 'a b'"),
        ({"bootstrap_host": "::1"}, "bootstrap_host is '::1'"),
        ({"bootstrap_host": "a..b"}, "bootstrap_host is 'a..b'"),
        ({"bootstrap_host": 7}, "bootstrap_host is 7"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "not part of the public API"),
        ({"disagg_prefill_dp_rank": 1}, "not part of the public API"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_bad_bodies_are_refused_by_both(pair: Halves, fields: Json, message: str) -> None:
    for reply in pair.both("/v1/completions", {**completion("a b c"), **pair.place(), **fields}):
        assert message in error_of(reply, 400)


@pytest.mark.parametrize(
    ("half", "fields", "message"),
    [
        (_DECODE, {"bootstrap_host": "192.0.2.7"}, "not on --trusted-data-network 127.0.0.0/8"),
        (_DECODE, {"bootstrap_host": "no-such-host.invalid"}, "cannot be resolved"),
        (_PREFILL, {"bootstrap_host": "192.0.2.7"}, "this prefill worker is known as 127.0.0.1:"),
        (_PREFILL, {"bootstrap_port": 9}, "start the worker with --advertise"),
    ],
)
def test_places_that_a_half_cannot_take(pair: Halves, half: int, fields: Json, message: str) -> None:
    worker = (pair.prefill, pair.decode)[half]
    body = {**completion("a b c"), **pair.place(), **fields}
    assert message in error_of(worker.http.post("/v1/completions", json=body), 400)


def test_a_server_of_ours_has_no_halves(own: Api, pair: Halves) -> None:
    for fields in (pair.place(), {"kv_transfer_params": {"do_remote_prefill": True}}):
        reply = own.http.post("/v1/completions", json={**completion("a b c"), **fields})
        assert "not part of the public API" in error_of(reply, 400)


# ---------------------------------------------------------------- halves that do not meet

_SOON = {"x-deadline-seconds": "1"}


def test_prefill_alone_ends_at_its_deadline(pair: Halves) -> None:
    body = {**completion("a b c"), **pair.place()}
    message = error_of(pair.prefill.http.post("/v1/completions", json=body, headers=_SOON), 504)
    assert "no decode worker has asked for bootstrap_room" in message


def test_a_prefill_worker_that_is_not_there(pair: Halves) -> None:
    body = {**completion("a b c"), **pair.place(bootstrap_port=9)}
    message = error_of(pair.decode.http.post("/v1/completions", json=body), 503)
    assert "bootstrap_host and bootstrap_port name does not answer" in message
    wait_until(lambda: pair.decode.workers().keys() <= {pair.decode.worker, pair.prefill.worker}, "it to be forgotten")


def test_foreign_rooms_do_not_meet(pair: Halves) -> None:
    """Decode drives its half and is answered; prefill's half waits for a room that nobody asks for."""
    decode = pair.decode.http.post("/v1/completions", json={**completion("a b c"), **pair.place()})
    assert decode.status_code == 200
    body = {**completion("a b c"), **pair.place()}
    error_of(pair.prefill.http.post("/v1/completions", json=body, headers=_SOON), 504)


def test_a_room_of_another_prompt_is_refused(pair: Halves) -> None:
    place = pair.place()
    assert pair.decode.http.post("/v1/completions", json={**completion("a b c"), **place}).status_code == 200
    reply = pair.prefill.http.post("/v1/completions", json={**completion("another one"), **place})
    assert "bootstrap_room is another request's" in error_of(reply, 409)


def test_halves_may_come_one_after_the_other(pair: Halves) -> None:
    place = pair.place()
    assert pair.decode.http.post("/v1/completions", json={**completion("a b c"), **place}).status_code == 200
    assert_done(pair.prefill.http.post("/v1/completions", json={**completion("a b c"), **place}))


@pytest.mark.parametrize("half", [_PREFILL, _DECODE])
def test_two_requests_with_one_room(pair: Halves, half: int) -> None:
    worker = (pair.prefill, pair.decode)[half]
    for _ in range(MAX_TRIES):
        body = {**completion("a b c"), **pair.place(), "max_tokens": 8000, "ignore_eos": True}
        with unanswered(worker, body):
            reply = worker.http.post("/v1/completions", json=body)
        if reply.status_code != 200:  # else the first one had its answer before
            break
    assert "bootstrap_room is another request's" in error_of(reply, 409)
    wait_until(lambda: worker.info()["engine"]["rooms"] == 0, "the request to be given up")


@contextmanager
def unanswered(worker: HalfWorker, body: Json) -> Iterator[None]:
    """A request that is there, unless it has its answer already, and whose client leaves it at the end."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", worker.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        wait_until(
            lambda: worker.info()["engine"]["rooms"] == 1 or is_answered(connection), "the request to be there", worker
        )
        yield


def is_answered(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


# ---------------------------------------------------------------- a worker ends


def test_a_killed_prefill_is_an_error_and_the_next_request_is_answered(
    pair: Halves, asked: list[AskedDocument]
) -> None:
    prefill, name = pair.prefill, pair.prefill.worker
    body = {**completion(asked[0].prompt), **pair.place()}
    killed = prefill.pid(name)
    replies: list[tuple[httpx.Response, ...]] = []
    asking = Thread(target=lambda: replies.append(pair.both("/v1/completions", body)))

    def are_there() -> bool:
        """Both halves; else their ends, for a worker that is silent for seconds ends them, too."""
        return all(half.info()["engine"]["rooms"] == 1 for half in (pair.decode, prefill)) or not asking.is_alive()

    with halted(killed):
        asking.start()
        wait_until(are_there, "both halves to be there")
        os.kill(killed, signal.SIGKILL)
    asking.join()
    for reply in replies[0]:
        assert reply.status_code in (502, 503), reply.text
    prefill.wait_back(name)

    def is_answered() -> bool:
        again = pair.both("/v1/completions", {**body, **pair.place()}, {"x-deadline-seconds": "20"})
        return [reply.status_code for reply in again] == [200, 200] and tokens_of(again[1]) == [asked[0].answer]

    wait_until(is_answered, "an answer")


def test_nothing_stays_held(pair: Halves) -> None:
    """The last of all."""
    pair.prefill.wait_quiet()
    pair.decode.wait_quiet()
