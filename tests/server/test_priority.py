"""What a body says under `priority` reaches the workers, in every dialect; it is told apart within bounds."""

import json

import pytest

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.corpus import JSON, generate
from tests.server.oracle import OracleEngine
from tests.server.test_kv_hints import MAKERS


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(("given", "priority"), [(3, 3), (-8, -8), (9, 8), (-(10**30), -8), (0, 0), (None, 0)])
async def test_priorities_reach_the_workers(codec: TextCodec, path: str, given: int | None, priority: int) -> None:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"priority": given}), headers=JSON)
        assert reply.status_code == 200, reply.text
    assert [generation.priority for generation in engine.opened] == [priority]


@pytest.mark.anyio
@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize("given", ["high", 1.5, True, [1]])
async def test_what_is_no_number_is_refused_by_name(codec: TextCodec, path: str, given: object) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"priority": given}), headers=JSON)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "priority" in error["message"] if path == "/v1/messages" else error["param"] == "priority"


@pytest.mark.anyio
async def test_of_several_samples_each_has_it(codec: TextCodec) -> None:
    engine = OracleEngine()
    body = json.loads(generate({"priority": 2}))
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post("/generate", json={**body, "sampling_params": {"n": 2, "max_new_tokens": 1}})
        assert reply.status_code == 200, reply.text
    assert [generation.priority for generation in engine.opened] == [2, 2]
