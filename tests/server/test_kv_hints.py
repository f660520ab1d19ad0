"""What a body says under `kv_hints` reaches the workers; what nobody knows there is refused by name."""

from collections.abc import Callable, Mapping

import pytest

from deltaserve.core.hints import NO_HINTS, KvHints
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.corpus import JSON, chat, completion, generate
from tests.server.corpus_agents import message, response
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
MAKERS: dict[str, Callable[[Mapping[str, object]], bytes]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": response,
    "/v1/messages": message,
    "/generate": generate,
}


@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(
    ("given", "hints"),
    [({"done": True}, KvHints(done=True)), ({"done": False}, NO_HINTS), ({"done": None}, NO_HINTS), ({}, NO_HINTS)],
)
async def test_hints_reach_the_workers(
    codec: TextCodec, path: str, given: Mapping[str, object], hints: KvHints
) -> None:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"kv_hints": given}), headers=JSON)
        assert reply.status_code == 200, reply.text
    assert [generation.hints for generation in engine.opened] == [hints]


@pytest.mark.parametrize("path", MAKERS)
@pytest.mark.parametrize(
    ("given", "param"),
    [
        (True, "kv_hints"),
        ([], "kv_hints"),
        ({"done": 1}, "kv_hints.done"),
        ({"done": "yes"}, "kv_hints.done"),
        ({"prefetch": True}, "kv_hints.prefetch"),
    ],
)
async def test_wrong_hints_are_refused_by_name(codec: TextCodec, path: str, given: object, param: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"kv_hints": given}), headers=JSON)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert param in error["message"] if path == "/v1/messages" else error["param"] == param
