"""Every documented field of every endpoint with values of every type: an answer or a 400 that names the field."""

import json
import re
from collections.abc import Iterator, Mapping

import pytest
from pydantic import BaseModel, ValidationError

from deltaserve.server.body_fields import NO_EFFECT, UNSUPPORTED
from deltaserve.server.dialects.anthropic import CountBody, MessagesBody
from deltaserve.server.dialects.chat import ChatBody
from deltaserve.server.dialects.completions import CompletionBody
from deltaserve.server.dialects.generate import GenerateBody, GenerateSampling
from deltaserve.server.dialects.responses import ResponsesBody
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
    "responses": ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 2}),
    "messages": (
        "/v1/messages",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    "count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "x"}),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [100]}),
}
MODELS: Mapping[str, type[BaseModel]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "generate": GenerateBody,
    "sampling": GenerateSampling,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "count": CountBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
NEEDED = {"completions": ["prompt"], "generate": ["text"], "tokenize": ["prompt"]}
"""Fields without which a body asks for nothing, besides those that its model says are required."""
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


def optional(name: str) -> Iterator[str]:
    required = {info.alias or field for field, info in MODELS[name].model_fields.items() if info.is_required()}
    return (field for field in fields(name) if field not in required and field not in NEEDED.get(name, ()))


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
    if path.startswith("/v1/messages"):  # Anthropic's shape has no place for the field
        error = {"param": re.split(":? ", error["message"])[0], "message": error["message"]}
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
        for field in optional(name):
            assert await _refusal(case, *with_field(name, field, None)) is None, field


EMPTY: tuple[object, ...] = (0, "", [], {}, False)
TOLD = (", expected ", " is not supported", " is required", "should have at least")


@pytest.mark.parametrize("name", BODIES)
async def test_an_empty_value_of_another_type_is_refused_with_the_type(codec: TextCodec, name: str) -> None:
    """It is not taken for a field that is not there: that is null alone, and what the field's own type has."""
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for field in optional(name):
            for value in EMPTY:
                error = await _refusal(case, *with_field(name, field, value))
                if _takes(name, field, value):
                    continue
                assert error is not None, (field, value)
                assert error["param"].removeprefix("sampling_params.").startswith(field)
                assert any(words in error["message"] for words in TOLD), (value, error)


@pytest.mark.parametrize("name", BODIES)
def test_no_optional_field_takes_anything(name: str) -> None:
    """What is told from nothing by its truth alone takes 0 for nothing."""
    for field in optional(name):
        assert not all(_takes(name, field, value) for value in EMPTY), field


def _takes(name: str, field: str, value: object) -> bool:
    """Whether the field's type has this value."""
    _, body = BODIES[name]
    try:
        MODELS[name].model_validate({**(body if name != "sampling" else {}), field: value})
    except ValidationError as error:
        return not any(each["loc"][0] == field for each in error.errors())
    return True


@pytest.mark.parametrize("field", [*UNSUPPORTED, *NO_EFFECT])
async def test_an_unsupported_field_is_not_there_when_it_is_empty_in_its_own_type(codec: TextCodec, field: str) -> None:
    nothing = UNSUPPORTED.get(field) or [None, NO_EFFECT[field]()]
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        assert await _refusal(case, *with_field("detokenize", field, None)) is None
        for value in EMPTY:
            is_taken = any(type(value) is type(one) and value == one for one in nothing)
            error = await _refusal(case, *with_field("detokenize", field, value))
            assert (error is None) == is_taken, value
            assert error is None or error["param"] == field
    assert sum(any(type(value) is type(one) for one in nothing) for value in EMPTY) <= 2, "its type is known"
