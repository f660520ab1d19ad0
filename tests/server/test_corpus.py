"""Every bad request of the corpus gets its answer, the engine hears nothing of it, and the next good one is served."""

import asyncio
import json

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, Served, served
from tests.server.corpus import CASES, JSON, Case, completion
from tests.server.corpus_agents import AGENT_CASES, MESSAGES
from tests.server.corpus_more import ADMIN, KEY_CASES, MORE_CASES, USER
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import RAW_CASES

pytestmark = pytest.mark.anyio
MAX_ECHO = 80
PLAIN_CASES = [*CASES, *MORE_CASES, *AGENT_CASES]


async def _canary(case: Served) -> None:
    headers = JSON | {"authorization": f"Bearer {USER.secret}"}
    reply = await case.client.post("/v1/completions", content=completion({}), headers=headers)
    assert reply.json()["choices"][0]["text"] == "olleh"


def check_error(body: dict[str, object], code: str, param: str | None, sent: bytes) -> None:
    """OpenAI's error shape, the code and field, and no long piece of what was sent."""
    assert body.keys() == {"error"}
    error = body["error"]
    assert isinstance(error, dict)
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    message = error["message"]
    assert isinstance(message, str) and message
    _check_echo(message, sent)


def _check_echo(message: str, sent: bytes) -> None:
    windows = (message[at : at + MAX_ECHO + 1].encode() for at in range(len(message) - MAX_ECHO))
    assert not any(window in sent for window in windows), "a long client value must not come back"


def check_anthropic_error(body: dict[str, object], case: Case, sent: bytes) -> None:
    """Anthropic's error shape, the field in front of the message, or that the prompt is too long in front of it."""
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    error = body["error"]
    assert isinstance(error, dict) and error.keys() == {"type", "message"}
    assert error["type"] == ("not_found_error" if case.status == 404 else "invalid_request_error")
    start = "prompt is too long: " if case.code == "context_length_exceeded" else ""
    starts = ("",) if case.param is None else (f"{case.param}: ", f"{case.param} ")
    assert error["message"].startswith(tuple(start + each for each in starts)), error
    _check_echo(error["message"], sent)


async def _check(server: Served, case: Case) -> None:
    async with asyncio.timeout(PATIENCE_S):
        reply = await server.client.request(case.method, case.path, content=case.body, headers=dict(case.headers))
    assert reply.status_code == case.status, reply.text[:300]
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req-")
    assert ("allow" in reply.headers) == (case.status == 405)
    body, sent = json.loads(reply.content), case.path.encode() + case.body
    if case.path.startswith(MESSAGES):
        check_anthropic_error(body, case, sent)
    else:
        check_error(body, case.code, case.param, sent)
    assert server.engine.opened == [], "validation ends before any engine call"
    await _canary(server)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=[case.name for case in PLAIN_CASES])
async def test_refused_and_still_serving(codec: TextCodec, case: Case) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as server:
        await _check(server, case)


@pytest.mark.parametrize("case", KEY_CASES, ids=[case.name for case in KEY_CASES])
async def test_strangers_are_refused_and_holders_of_a_key_served(codec: TextCodec, case: Case) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL, api_keys=(USER, ADMIN))) as server:
        await _check(server, case)


def test_the_corpus_is_large_and_named_apart() -> None:
    names = [*(case.name for case in (*PLAIN_CASES, *KEY_CASES)), *(case.name for case in RAW_CASES)]
    assert len(set(names)) == len(names)
    assert len(names) >= 400
