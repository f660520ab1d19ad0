"""Every documented field of every endpoint with values of every type: an answer or a 400 that names the field."""

import json
from collections.abc import Iterator, Mapping

import pytest
from pydantic import BaseModel

from deltaserve.server.dialects.chat import ChatBody
from deltaserve.server.dialects.completions import CompletionBody
from deltaserve.server.dialects.generate import GenerateBody, GenerateSampling
from deltaserve.server.info_routes import DetokenizeBody, TokenizeBody
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, Served, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
Body = dict[str, object]

BODIES: Mapping[str, tuple[str, Body]] = {
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 2}),
    "chat": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    "generate": ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}}),
    "sampling": ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}}),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "x"}),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [100]}),
}
MODELS: Mapping[str, type[BaseModel]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "generate": GenerateBody,
    "sampling": GenerateSampling,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
NEEDED = {"prompt", "messages", "text", "tokens"}
OUTSIDE = {"model", "stream", "stream_options"}
"""Not for sampling_params."""

ODD: tuple[object, ...] = (
    True, 0, -1, 2, 1.5, -0.0, 1e308, 5e-324, 2**31, 2**63, 10**30, "", "x", "\0", "\U0001f600", "x" * 5000,
    [], [None], [[]], [{}], [""], ["x"], [0], [1.5], [True], [10**30], ["x"] * 2000,
    {}, {"": None}, {"a": {}}, {"0": 1}, {"0": None}, {"type": []}, {"include_usage": None},
)  # fmt: skip


def fields(name: str) -> Iterator[str]:
    for field, info in MODELS[name].model_fields.items():
        if not (name == "sampling" and field in OUTSIDE):
            yield info.alias or field


def with_field(name: str, field: str, value: object) -> tuple[str, Body]:
    path, body = BODIES[name]
    if name != "sampling":
        return path, {**body, field: value}
    return path, {**body, "sampling_params": {"max_new_tokens": 2, field: value}}


async def _refusal(case: Served, path: str, body: Body) -> Mapping[str, str] | None:
    reply = await case.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    if reply.status_code == 200:
        return None
    assert reply.status_code in (400, 404), (body, reply.text)
    error = reply.json()["error"]
    assert error["param"] and "nput should" not in error["message"], (body, error)
    return dict(error)


@pytest.mark.parametrize("name", BODIES)
async def test_a_field_of_any_type_is_taken_or_named(codec: TextCodec, name: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for field in fields(name):
            for value in ODD:
                await _refusal(case, *with_field(name, field, value))
        assert await _refusal(case, *BODIES[name]) is None


@pytest.mark.parametrize("name", BODIES)
async def test_null_is_as_if_absent(codec: TextCodec, name: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for field in fields(name):
            if field not in NEEDED:
                assert await _refusal(case, *with_field(name, field, None)) is None, field
