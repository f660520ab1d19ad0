"""POST /v1/chat/completions and /generate over the oracle engine."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deltaserve.core.wire.messages import CacheUse
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID
from tests.server.conftest import MODEL, Served, events, served
from tests.server.oracle import OracleEngine, logprob_of

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def _says(text: str, end: int = EOS_ID) -> OracleEngine:
    return OracleEngine(answer=lambda generation: [*text.encode(), end])


async def _post(case: Served, **fields: object) -> Mapping[str, object]:
    reply = await case.client.post(URL, json={"model": MODEL, "messages": HI} | fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert isinstance(body, dict)
    return body


async def _streamed(case: Served, **fields: object) -> list[dict[str, object]]:
    reply = await case.client.post(URL, json={"model": MODEL, "messages": HI, "stream": True} | fields)
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def _deltas(parts: list[dict[str, object]]) -> list[dict[str, object]]:
    choices = [part["choices"] for part in parts]
    assert all(isinstance(choice, list) for choice in choices)
    return [choice[0]["delta"] for choice in choices if choice]  # type: ignore[index]


async def test_a_whole_answer(codec: TextCodec) -> None:
    engine = _says("fine \U0001f600")
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "fine \U0001f600", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = bytes(engine.opened[0].prompt[::4])
    assert len(prompt) == body["usage"]["prompt_tokens"]  # type: ignore[index]
    sampling = engine.opened[0].sampling
    assert sampling.max_tokens == 512 - len(prompt), "the default takes what the context leaves"
    assert sampling.stop_token_ids == (EOS_ID,)


async def test_the_role_comes_with_the_first_token_only(codec: TextCodec) -> None:
    async with served(codec, _says("\u4f60!"), SETTINGS) as case:
        parts = await _streamed(case)
    assert _deltas(parts) == [
        {"role": "assistant", "content": ""},  # one byte of three: the token is there, its character is not
        {"content": "\u4f60"},
        {"content": "!"},
        {},
    ]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]


async def test_a_stop_string_across_tokens_is_never_shown(codec: TextCodec) -> None:
    engine = _says("one</end>two")
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, stop=["</end>"])
        parts = await _streamed(case, stop=["</end>"])
    choice = body["choices"][0]  # type: ignore[index]
    assert choice["message"]["content"] == "one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "</end>")
    assert "".join(str(delta.get("content", "")) for delta in _deltas(parts)) == "one"
    assert set(engine.finished.values()) == {9}


async def test_logprobs(codec: TextCodec) -> None:
    async with served(codec, _says("\u00e9"), SETTINGS) as case:
        body = await _post(case, logprobs=True, top_logprobs=1, max_tokens=2)
        bare = await _post(case, logprobs=True)
        parts = await _streamed(case, logprobs=True, top_logprobs=1)
    first = {"token": "bytes:\\xc3", "logprob": logprob_of(0xC3), "bytes": [0xC3]}
    content = body["choices"][0]["logprobs"]["content"]  # type: ignore[index]
    assert content[0] == first | {"top_logprobs": [first]}
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []  # type: ignore[index]
    streamed = [part["choices"][0]["logprobs"]["content"] for part in parts]  # type: ignore[index]
    assert [entry for entries in streamed for entry in entries] == content


async def test_what_is_said_of_the_prompt_stands_beside_the_choices(codec: TextCodec) -> None:
    """As in vLLM; in a completion it stands in each choice."""
    asked: dict[str, object] = {"n": 2, "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2}
    async with served(codec, _says("fine"), SETTINGS) as case:
        body = await _post(case, **asked)
        parts = await _streamed(case, **asked)
    prompt = body["prompt_token_ids"]
    assert isinstance(prompt, list)
    assert len(body["prompt_logprobs"]) == len(prompt)  # type: ignore[arg-type]
    told = [part for part in parts if "prompt_token_ids" in part]
    assert [part["prompt_token_ids"] for part in told] == [prompt], "once"
    assert [part["prompt_logprobs"] for part in told] == [body["prompt_logprobs"]]
    choices = [choice for each in (body, *parts) for choice in each["choices"]]  # type: ignore[attr-defined]
    assert all("token_ids" in choice for choice in choices)
    assert not any(name.startswith("prompt_") for choice in choices for name in choice)


@pytest.mark.parametrize("stop", ["<|pad|>", "e<|pad|>", "<|pad|>t", "e<|pad|>t", "e<|pad"])
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_stop_string_with_a_control_token_ends_where_the_token_comes(
    codec: TextCodec, stop: str, keeps: bool
) -> None:
    engine = OracleEngine(answer=lambda generation: [*b"on", ord("e"), 259, *b"two", EOS_ID])
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, stop=[stop], include_stop_str_in_output=keeps)
        parts = await _streamed(case, stop=[stop], include_stop_str_in_output=keeps)
    choice = body["choices"][0]  # type: ignore[index]
    wanted = "onetwo" if stop == "e<|pad" else "one<|pad|>two".split(stop)[0] + (stop if keeps else "")
    assert choice["message"]["content"] == wanted
    assert choice["stop_reason"] == (None if stop == "e<|pad" else stop)
    assert "".join(str(delta.get("content", "")) for delta in _deltas(parts)) == choice["message"]["content"]


async def test_a_conversation_with_tools_in_its_past(codec: TextCodec) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, messages=messages, max_tokens=1, return_token_ids=True)
    prompt = codec.decode(body["prompt_token_ids"])  # type: ignore[arg-type]
    assert prompt == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_control_tokens_cannot_be_split_over_content_parts(codec: TextCodec) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, messages=[{"role": "user", "content": parts}], max_tokens=1, return_token_ids=True)
    assert body["prompt_token_ids"].count(EOS_ID) == 1  # type: ignore[attr-defined]


async def test_sampling_fields_reach_the_engine(codec: TextCodec) -> None:
    engine = OracleEngine()
    fields: dict[str, object] = {
        "max_completion_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 9,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "logit_bias": {"7": -100, "3": 1},
    }
    async with served(codec, engine, SETTINGS) as case:
        await _post(case, **fields, no_cache=True)
        await _post(case, top_k=-1, ignore_eos=True, max_tokens=1)
    sampling = engine.opened[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.25, 1.5, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 2.0)
    assert (sampling.min_tokens, sampling.stop_token_ids) == (2, (5, EOS_ID))
    assert sampling.logit_bias == ((3, 1.0), (7, -100.0))
    assert engine.opened[0].cache is CacheUse.BYPASS
    assert engine.opened[1].cache is CacheUse.NORMAL
    assert (engine.opened[1].sampling.top_k, engine.opened[1].sampling.stop_token_ids) == (None, ())


async def test_a_model_without_template_serves_completions_only(model_folder: Path) -> None:
    bare = TextCodec(Tokenizer.from_file(str(model_folder / "tokenizer.json")), 272, [EOS_ID])
    async with served(bare, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(URL, json={"model": MODEL, "messages": HI})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported")
        reply = await case.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.status_code == 200


# --- /generate


async def test_generate(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 1}, "return_logprob": True}
        reply = (await case.client.post("/generate", json=body)).json()
        assert (reply["text"], bytes(reply["output_ids"])) == ("cba", b"cba")
        meta = reply["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 2)
        assert meta["output_token_logprobs"][0] == [logprob_of(ord("c")), ord("c"), None]
        body = {"input_ids": [97, 98], "sampling_params": {"stop": "a", "max_new_tokens": 9}}
        reply = (await case.client.post("/generate", json=body)).json()
        assert (reply["text"], reply["meta_info"]["finish_reason"]) == ("b", {"type": "stop", "matched": "a"})
        reply = (await case.client.post("/generate", json={"input_ids": [EOS_ID, 98]})).json()
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}


async def test_generate_streams_the_whole_text_so_far(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 3}}
        parts = events((await case.client.post("/generate", json=body)).text)
    assert [part["text"] for part in parts] == ["c", "cb", "cba", "cba"]
    assert parts[-1]["output_ids"] == list(b"cba")
    assert parts[-1]["meta_info"]["cached_tokens"] == 2  # type: ignore[index]


async def test_generate_encodes_each_token_once(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event repeats all that came before it: encoding that anew would make long streams quadratic."""
    labelled: list[int] = []
    label = codec.token_label

    def watched(token: int) -> str:
        labelled.append(token)
        return label(token)

    monkeypatch.setattr(codec, "token_label", watched)
    body: dict[str, object] = {"text": 'a"\u00e9', "sampling_params": {"max_new_tokens": 100}}
    body |= {"return_logprob": True, "return_text_in_logprobs": True}
    async with served(codec, OracleEngine(), SETTINGS) as case:
        whole = (await case.client.post("/generate", json=body)).json()
        labelled.clear()
        parts = events((await case.client.post("/generate", json=body | {"stream": True})).text)
    assert len(labelled) == 100
    assert len(parts) == 101
    for name in ("text", "output_ids"):
        assert parts[-1][name] == whole[name]
    assert parts[-1]["meta_info"] | {"id": ""} == whole["meta_info"] | {"id": ""}  # type: ignore[operator]
