"""POST /v1/completions over the oracle engine: what comes back, in which shape."""

from collections.abc import Mapping

import pytest
from tokenizers import processors

from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.text_folder import VOCAB
from tests.fixtures.tiny_tokenizer import BOS_ID, EOS_ID, build_tokenizer
from tests.server.conftest import MODEL, Served, events, served
from tests.server.oracle import OracleEngine, logprob_of

pytestmark = pytest.mark.anyio
SETTINGS = ServerSettings(MODEL)
URL = "/v1/completions"


async def _post(case: Served, **fields: object) -> Mapping[str, object]:
    reply = await case.client.post(URL, json={"model": MODEL, "prompt": "hello", "max_tokens": 5} | fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert isinstance(body, dict)
    return body


async def _choices(case: Served, **fields: object) -> list[dict[str, object]]:
    choices = (await _post(case, **fields))["choices"]
    assert isinstance(choices, list)
    return choices


async def _streamed(case: Served, **fields: object) -> list[dict[str, object]]:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "stream": True} | fields
    reply = await case.client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(reply.text)


async def test_a_whole_answer(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = await _post(case)
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert str(body["id"]).startswith("cmpl-")
    expected = {"index": 0, "text": "olleh", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert body["choices"] == [expected]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ba"]),
        (["ab", "xyz"], ["ba", "zy"]),
        ([97, 98], ["ba"]),
        ([[97, 98], [120, 121, 122]], ["ba", "zy"]),
        (["ab", [120, 121]], ["ba", "yx"]),
    ],
)
async def test_every_form_of_a_prompt(codec: TextCodec, prompt: object, texts: list[str]) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        choices = await _choices(case, prompt=prompt, max_tokens=2)
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(len(texts)))


async def test_special_tokens_in_a_prompt_are_parsed(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        body = await _post(case, prompt="<|im_start|>a", return_token_ids=True)
    choices = body["choices"]
    assert isinstance(choices, list)
    assert choices[0]["prompt_token_ids"] == [257, 97]


async def test_too_many_prompts_are_refused_before_any_is_cut_into_tokens(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        reply = await case.client.post(URL, json={"model": MODEL, "prompt": ["a"] * 1024 + [{}]})
    assert reply.status_code == 400
    assert "there are 1025 prompts, at most 1024 are allowed" in reply.json()["error"]["message"]


async def test_a_seed_of_minus_one_is_a_random_one(codec: TextCodec) -> None:
    """As clients of llama.cpp's kind mean it."""
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        for _ in range(2):
            await _post(case, seed=-1)
    one, other = (generation.sampling.seed for generation in engine.opened)
    assert one != other and 2**64 - 1 not in (one, other)


async def test_samples_have_rooms_and_seeds_of_their_own(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, prompt=["ab", "cd"], n=3, seed=-2, max_tokens=2)
        await _post(case, n=2, seed=-2)
    choices = body["choices"]
    assert isinstance(choices, list)
    assert [choice["text"] for choice in choices] == ["ba"] * 3 + ["dc"] * 3
    first, second = engine.opened[:6], engine.opened[6:]
    assert len({generation.room for generation in engine.opened}) == 8
    assert all(len(generation.room) == 16 for generation in engine.opened)
    seeds = [generation.sampling.seed for generation in first]
    assert seeds[0] == 2**64 - 2, "a negative seed is taken modulo 2**64"
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:], "sample i of every prompt draws from the same stream"
    assert [generation.sampling.seed for generation in second] == seeds[:2]
    usage = body["usage"]
    assert isinstance(usage, dict)
    assert usage["prompt_tokens"] == 4, "a prompt counts once"
    assert usage["completion_tokens"] == 12


async def test_a_seed_is_minted_when_absent(codec: TextCodec) -> None:
    engine = OracleEngine()
    async with served(codec, engine, SETTINGS) as case:
        await _post(case)
        await _post(case)
    assert engine.opened[0].sampling.seed != engine.opened[1].sampling.seed


async def test_end_of_sequence_is_not_shown(codec: TextCodec) -> None:
    engine = OracleEngine(answer=lambda generation: [97, EOS_ID, 98])
    async with served(codec, engine, SETTINGS) as case:
        (choice,) = await _choices(case, return_token_ids=True)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
        assert choice["token_ids"] == [97, EOS_ID]
        (choice,) = await _choices(case, ignore_eos=True)
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        (choice,) = await _choices(case, ignore_eos=True, stop_token_ids=[98])
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 98)
        (choice,) = await _choices(case, ignore_eos=True, skip_special_tokens=False)
        assert choice["text"] == "a<|im_end|>b"


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 7])
async def test_stop_strings_end_the_room(codec: TextCodec, tokens_per_delta: int) -> None:
    engine = OracleEngine(tokens_per_delta=tokens_per_delta)
    async with served(codec, engine, SETTINGS) as case:
        body = await _post(case, prompt="0123456789", max_tokens=20, stop=["65", "x"], return_token_ids=True)
        choices = body["choices"]
        assert isinstance(choices, list)
        assert choices[0]["text"] == "987"
        assert (choices[0]["finish_reason"], choices[0]["stop_reason"]) == ("stop", "65")
        assert bytes(choices[0]["token_ids"]) == b"98765"
        usage = body["usage"]
        assert isinstance(usage, dict)
        assert usage["completion_tokens"] == 5
        assert list(engine.finished.values()) == [5], "the engine keeps what completed the stop string"
        (choice,) = await _choices(case, prompt="0123456789", stop="65", max_tokens=20, include_stop_str_in_output=True)
        assert choice["text"] == "98765"
        (choice,) = await _choices(case, prompt="0123456789", stop="9", max_tokens=20, min_tokens=5)
        assert choice["text"] == "9876543210", "before min_tokens a stop string is ordinary text"


async def test_logprobs(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        (choice,) = await _choices(case, prompt="ab", max_tokens=2, logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["b", "a"],
        "token_logprobs": [logprob_of(98), logprob_of(97)],
        "top_logprobs": [
            {"b": logprob_of(98), "c": logprob_of(98) - 1},
            {"a": logprob_of(97), "b": logprob_of(97) - 1},
        ],
        "text_offset": [0, 1],
    }


async def test_echo_with_logprobs_covers_the_prompt(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        whole = await _choices(case, prompt="ab", max_tokens=2, logprobs=0, echo=True)
        parts = await _streamed(case, prompt="ab", max_tokens=2, logprobs=0, echo=True)
    assert whole[0]["text"] == "abba"
    logprobs = whole[0]["logprobs"]
    assert isinstance(logprobs, dict)
    assert logprobs["tokens"] == ["a", "b", "b", "a"]
    assert logprobs["token_logprobs"] == [None, logprob_of(98), logprob_of(98), logprob_of(97)]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    streamed = [part["choices"][0] for part in parts]  # type: ignore[index]
    assert "".join(part["text"] for part in streamed) == "abba"
    assert [token for part in streamed for token in part["logprobs"]["tokens"]] == ["a", "b", "b", "a"]
    assert [offset for part in streamed for offset in part["logprobs"]["text_offset"]] == [0, 1, 2, 3]


async def test_echo_of_ids_spells_special_tokens(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        (choice,) = await _choices(case, prompt=[257, 97, VOCAB - 1], max_tokens=2, echo=True)
    assert choice["text"] == "<|im_start|>a" + "a", "ids without text have none"


async def test_prompt_logprobs(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        (choice,) = await _choices(case, prompt="abc", max_tokens=1, prompt_logprobs=1)
    listed = choice["prompt_logprobs"]
    assert isinstance(listed, list)
    assert listed[0] is None
    assert listed[1:] == [
        {str(token): {"logprob": logprob_of(token), "decoded_token": chr(token)}} for token in (98, 99)
    ]


async def test_a_stream_says_the_same(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        parts = await _streamed(case, n=2, stream_options={"include_usage": True}, return_token_ids=True)
    *chunks, last = parts
    assert last["choices"] == []
    usage = last["usage"]
    assert isinstance(usage, dict)
    assert usage["completion_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]  # type: ignore[index]
        assert "".join(choice["text"] for choice in mine) == "olleh"
        assert bytes(token for choice in mine for token in choice["token_ids"]) == b"olleh"
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
        assert mine[0]["prompt_token_ids"] == list(b"hello")


async def test_stream_interval_joins_tokens(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL, stream_interval=3)) as case:
        parts = await _streamed(case, prompt="01234567", max_tokens=8)
    texts = [part["choices"][0]["text"] for part in parts]  # type: ignore[index]
    assert texts == ["7", "654", "321", "0"]


async def test_timings_come_with_the_usage(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), SETTINGS) as case:
        whole = await _post(case, timings=True)
        *_, last = await _streamed(case, timings=True)
    for body in (whole, last):
        usage = body["usage"]
        assert isinstance(usage, dict)
        (timing,) = usage["timings"]
        assert timing["queue_s"] == 0.5
        assert (timing["decode_cached_tokens"], timing["prefill_cached_tokens"]) == (3, 2)
        assert timing["transferred_bytes"] == 1024


async def test_a_rendered_prompt_has_its_start_twice_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As vLLM and SGLang do it: the text is the client's, and `add_special_tokens` is how it says what is in it."""
    tokenizer = build_tokenizer().backend_tokenizer
    ends = [("<|bos|>", BOS_ID)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="$A $B", special_tokens=ends)
    wanted = {"<|bos|>a": [BOS_ID, BOS_ID, 97], "a": [BOS_ID, 97], "<|im_start|>a": [BOS_ID, 257, 97]}
    async with served(TextCodec(tokenizer, 272, [EOS_ID]), OracleEngine(), ServerSettings(MODEL)) as case:

        async def ids_of(prompt: str, **fields: object) -> list[int]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "return_token_ids": True} | fields
            reply = await case.client.post("/v1/completions", json=body)
            ids: list[int] = reply.json()["choices"][0]["prompt_token_ids"]
            return ids

        assert [await ids_of(prompt) for prompt in wanted] == list(wanted.values())
        assert await ids_of("<|bos|>a") == [BOS_ID, BOS_ID, 97]
        assert await ids_of("<|bos|>a", add_special_tokens=False) == [BOS_ID, 97]
    assert len([record for record in caplog.records if "add_special_tokens false" in record.message]) == 1
