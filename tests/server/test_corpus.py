"""Every bad request of the corpus gets its answer, the engine hears nothing of it, and the next good one is served."""

import json

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text import TextCodec
from tests.server.conftest import MODEL, Served, served
from tests.server.corpus import CASES, Case, completion
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
MAX_ECHO = 80


async def _canary(case: Served) -> None:
    reply = await case.client.post(
        "/v1/completions", content=completion({}), headers={"content-type": "application/json"}
    )
    assert reply.json()["choices"][0]["text"] == "olleh"


def _check_shape(case: Case, body: dict[str, object]) -> None:
    assert body.keys() == {"error"}
    error = body["error"]
    assert isinstance(error, dict)
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (case.code, case.param), error
    assert isinstance(error["message"], str) and error["message"]
    longest = max(len(word) for word in str(error["message"]).split())
    assert longest <= MAX_ECHO, "a long client value must not come back"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_refused_and_still_serving(codec: TextCodec, case: Case) -> None:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as server:
        reply = await server.client.request(case.method, case.path, content=case.body, headers=dict(case.headers))
        assert reply.status_code == case.status, reply.text[:300]
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"].startswith("req-")
        assert ("allow" in reply.headers) == (case.status == 405)
        _check_shape(case, json.loads(reply.content))
        assert engine.opened == [], "validation ends before any engine call"
        await _canary(server)


def test_the_corpus_is_large_and_named_apart() -> None:
    assert len(CASES) >= 350
