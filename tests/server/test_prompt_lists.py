"""Several prompts in one /generate, cut prompts, words that are not drawn, tokens told by their ids."""

import json

import pytest

from deltaserve.core.sampling import NEVER
from deltaserve.core.tokens import unpack_u32
from deltaserve.model.answer_grammars import AnswerGrammars
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, events, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
THREE = {"max_new_tokens": 3}


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ({"text": ["abc", "xyz"]}, ["cba", "zyx"]),
        ({"input_ids": [[97, 98, 99], [120, 121, 122]]}, ["cba", "zyx"]),
        ({"text": ["abc"]}, ["cba"]),
        ({"text": ["abc", "xyz"], "sampling_params": THREE | {"n": 2}}, ["cba", "cba", "zyx", "zyx"]),
        ({"text": "abc", "sampling_params": THREE | {"n": 2}}, ["cba", "cba"]),
    ],
)
@pytest.mark.parametrize("rid", [None, "mine"])
async def test_a_list_is_answered_by_a_list(
    codec: TextCodec, prompts: dict[str, object], texts: list[str], rid: str | None
) -> None:
    body = {"sampling_params": THREE, "rid": rid} | prompts
    async with served(codec, OracleEngine(), SETTINGS) as case:
        whole = (await case.client.post("/generate", json=body)).json()
        parts = events((await case.client.post("/generate", json=body | {"stream": True})).text)
    assert [each["text"] for each in whole] == texts
    ids = [each["meta_info"]["id"] for each in whole]
    assert len(set(ids)) == len(texts)
    assert rid is None or ids == [f"mine_{index}" for index in range(len(texts))]
    last = {part["index"]: part for part in parts}
    assert [last[index]["text"] for index in range(len(texts))] == texts
    assert all(last[index]["output_ids"] == whole[index]["output_ids"] for index in last)
    assert all("index" not in each for each in whole)


async def test_logprobs_of_a_list_are_each_prompts_own(codec: TextCodec) -> None:
    body = {"text": ["ab", "wxyz"], "sampling_params": THREE, "return_logprob": True, "logprob_start_len": 1}
    async with served(codec, OracleEngine(), SETTINGS) as case:
        whole = (await case.client.post("/generate", json=body)).json()
        assert [len(each["meta_info"]["input_token_logprobs"]) for each in whole] == [1, 3]
        assert [each["meta_info"]["prompt_tokens"] for each in whole] == [2, 4]
        reply = await case.client.post("/generate", json=body | {"logprob_start_len": 2})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprob_start_len")


@pytest.mark.parametrize(
    ("prompt", "most", "text"),
    [
        ("abcdef", 3, "fed"),
        ("abc", 3, "cba"),
        ("ab", 3, "bab"),
        ([97, 98, 99, 100], 2, "dcd"),
        (["abcdef", "uvwxyz"], 1, "fff"),
        ("a" * 500 + "xyz", -1, "zyx"),
    ],
)
async def test_a_prompt_is_cut_from_its_beginning(codec: TextCodec, prompt: object, most: int, text: str) -> None:
    engine = OracleEngine()
    body = {"prompt": prompt, "max_tokens": 3, "truncate_prompt_tokens": most}
    async with served(codec, engine, SETTINGS) as case:
        reply = (await case.client.post("/v1/completions", json=body)).json()
        assert reply["choices"][0]["text"] == text
        if most > 0:
            assert reply["usage"]["prompt_tokens"] <= most * len(reply["choices"])
        far = body | {"prompt": "x" * 100_000}
        refused = await case.client.post("/v1/completions", json=far)
        assert refused.json()["error"]["code"] == "context_length_exceeded", "not worth its tokenizing"


@pytest.mark.parametrize("kept", [1, 5, 30, 1000, -1])
async def test_a_conversation_is_cut_from_its_beginning_as_the_model_reads_it(codec: TextCodec, kept: int) -> None:
    engine = OracleEngine()
    body = {"messages": [{"role": "user", "content": "hello, how are you?"}], "max_tokens": 3}
    async with served(codec, engine, SETTINGS) as case:
        for asked in (body, body | {"truncate_prompt_tokens": kept}):
            assert (await case.client.post("/v1/chat/completions", json=asked)).status_code == 200
        whole, cut = (unpack_u32(generation.prompt) for generation in engine.opened)
        assert cut == (whole if kept < 0 else whole[-kept:])
        long = [{"role": "user", "content": "x" * 600}]
        fits = await case.client.post(
            "/v1/chat/completions", json={**body, "messages": long, "truncate_prompt_tokens": -1}
        )
        assert fits.json()["usage"]["prompt_tokens"] == 400, "the most that fits"
        far = {**body, "messages": [{"role": "user", "content": "x" * 100_000}], "truncate_prompt_tokens": 5}
        refused = await case.client.post("/v1/chat/completions", json=far)
        assert refused.json()["error"]["code"] == "context_length_exceeded", "not worth its tokenizing"


async def test_words_that_are_not_drawn(codec: TextCodec) -> None:
    """A word of one token never, the last token of several not behind the others; after a space as well."""
    engine = OracleEngine()
    body = {"prompt": "abc", "bad_words": ["x", "b", "bad", " no"], "logit_bias": {"120": 5, "99": 1}}
    async with served(codec, engine, SETTINGS) as case:
        await case.client.post("/v1/completions", json=body)
    sampling = engine.opened[0].sampling
    assert sampling.logit_bias == ((98, NEVER), (99, 1.0), (120, NEVER))
    texts = {codec.decode(word) for word in sampling.bad_words}
    assert texts == {" x", " b", "bad", " bad", " no"}


async def test_bad_words_have_a_bound(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        for words in (["x" * 1000] * 5, [""], ["x" * 1025], ["x"] * 301):
            reply = await case.client.post("/v1/completions", json={"prompt": "a", "bad_words": words})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"].startswith("bad_words")


async def test_only_some_tokens_are_drawn(codec: TextCodec) -> None:
    """Ends are none of them unless they are named; a grammar of tokens does the rest."""
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        for ids in ([97, 99, 100, 101], [97, 99, 100, 101, *codec.eos_ids]):
            body = {"prompt": "abc", "allowed_token_ids": ids, "max_tokens": 3}
            assert (await case.client.post("/v1/completions", json=body)).status_code == 200
    without, with_end = (generation.sampling for generation in engine.opened)
    assert without.logit_bias == tuple((token, NEVER) for token in codec.eos_ids)
    assert with_end.logit_bias == ()
    assert "<[97,99-101]>" in str(without.grammar)
    matcher = AnswerGrammars(codec.vocabulary).matcher(str(without.grammar))
    for token in (101, 97, 97, 100):
        mask = matcher.compute_bitmask()
        allowed = {token for token in range(codec.vocab_size) if mask[token // 8] >> token % 8 & 1}
        assert allowed - set(codec.eos_ids) == {97, 99, 100, 101}
        assert matcher.consume_token(token)


async def test_only_some_tokens_are_drawn_in_chats(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        for path, said in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            for ids in ([97, 99], [97, 272]):
                reply = await case.client.post(path, json={**said, "allowed_token_ids": ids})
                assert reply.status_code == (200 if ids == [97, 99] else 400), reply.text
            assert reply.json()["error"]["message"] == "allowed_token_ids must be one or more ids in 0..271"
    assert all("<[97,99]>" in str(generation.sampling.grammar) for generation in engine.opened)
    assert all(generation.sampling.logit_bias for generation in engine.opened), "ends are none of them"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_tokens_by_their_ids(codec: TextCodec, path: str) -> None:
    asked = {"prompt": "abc", "logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "return_tokens_as_token_ids": True}
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = (await case.client.post(path, json=body | asked)).json()
    told = json.dumps(reply["choices"][0]["logprobs"])
    assert told.count('"token_id:') >= 4
