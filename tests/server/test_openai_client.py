"""The official client library against a real socket: what it needs is there, and errors become its own types."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID
from tests.server.conftest import MODEL, live
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
KEY = "k" * 32
SETTINGS = ServerSettings(MODEL, port=0, api_keys=(ApiKey(KEY, Namespace("acme")),))
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def _client(codec: TextCodec, engine: OracleEngine, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        live(codec, engine, SETTINGS) as server,
        openai.AsyncOpenAI(api_key=key, base_url=server.url + "/v1", max_retries=0) as client,
    ):
        yield client


def _says(text: str) -> OracleEngine:
    return OracleEngine(answer=lambda generation: [*text.encode(), EOS_ID], tokens_per_delta=3)


async def test_chat(codec: TextCodec) -> None:
    async with _client(codec, _says("hello \u4f60\u597d")) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=HI, n=2, logprobs=True, top_logprobs=2, seed=3, stop=["zz"]
        )
        assert [choice.message.content for choice in reply.choices] == ["hello \u4f60\u597d"] * 2
        assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
        logprobs = reply.choices[1].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert (
            bytes(byte for entry in logprobs.content[:-1] for byte in entry.bytes or []).decode()
            == "hello \u4f60\u597d"
        )
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert reply.usage.completion_tokens == 26
        assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens * 3 // 4


async def test_chat_stream(codec: TextCodec) -> None:
    async with _client(codec, _says("hello \u4f60\u597d STOP more")) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, n=2, stop=" STOP", stream=True, stream_options={"include_usage": True}
        )
        texts, roles, finished, usages = ["", ""], [], [], []
        async for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles += [choice.delta.role] if choice.delta.role else []
                finished += [choice.finish_reason] if choice.finish_reason else []
        assert texts == ["hello \u4f60\u597d"] * 2
        assert (roles, finished) == (["assistant"] * 2, ["stop"] * 2)
        assert len(usages) == 1
        assert usages[0].completion_tokens == 2 * len("hello \u4f60\u597d STOP".encode())


async def test_completions(codec: TextCodec) -> None:
    async with _client(codec, OracleEngine()) as client:
        reply = await client.completions.create(
            model=MODEL, prompt=["ab", "cd"], max_tokens=2, n=2, logprobs=1, echo=True, extra_body={"timings": True}
        )
        assert [choice.text for choice in reply.choices] == ["abba", "abba", "cddc", "cddc"]
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "b", "b", "a"]
        stream = await client.completions.create(model=MODEL, prompt="abc", max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "cba"


async def test_models(codec: TextCodec) -> None:
    async with _client(codec, OracleEngine()) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("gpt-4")
        assert missing.value.code == "model_not_found"


async def test_errors_are_the_clients_own(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with _client(codec, engine) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=0)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "invalid_value",
            "max_tokens",
            "invalid_request_error",
        )
        assert bad.value.request_id is not None and bad.value.request_id.startswith("req-")
        engine.failure = RequestFailed(FailReason.OVERLOADED, "full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=HI)
        engine.failure, engine.fail_after = RequestFailed(FailReason.PEER_LOST, "gone"), 2
        with pytest.raises(openai.APIError, match="worker"):
            async for _ in await client.chat.completions.create(model=MODEL, messages=HI, stream=True):
                pass
    async with _client(codec, OracleEngine(), key="w" * 32) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
