"""The official client against a real server: answers, streams, seeds, and what a client that leaves sets free."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

HI: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are a very helpful assistant, and brief."},
    {"role": "user", "content": "What is a radix tree?"},
]
PLAIN = {"ignore_eos": True}
FLAGS = ("--page-size", "16", "--chunked-prefill-size", "32", "--num-pages", "512")


@pytest.fixture(scope="module")
def server(tiny_models: Path) -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-") as folder, serving(Path(folder), tiny_models / "qwen3", *FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{server.base_url}/v1", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def test_models(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["qwen3"]


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="qwen3", messages=HI, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3, extra_body=PLAIN
    )
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 24
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in choice.logprobs.content)
    text, usages = "", []
    for chunk in client.chat.completions.create(
        model="qwen3",
        messages=HI,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=PLAIN,
    ):
        text += "".join(part.delta.content or "" for part in chunk.choices)
        usages += [chunk.usage] if chunk.usage else []
    assert text == choice.message.content
    assert len(usages) == 1 and usages[0].completion_tokens == 24
    details = usages[0].prompt_tokens_details
    assert details is not None and details.cached_tokens == usages[0].prompt_tokens // 16 * 16


def test_second_turn_finds_the_first_one(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="qwen3", messages=HI, max_tokens=40, temperature=0, extra_body=PLAIN)
    turn: list[ChatCompletionMessageParam] = [
        *HI,
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Thanks."},
    ]
    second = client.chat.completions.create(model="qwen3", messages=turn, max_tokens=4, temperature=0)
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert details.cached_tokens >= (first.usage.prompt_tokens - len("<|im_start|>assistant\n")) // 16 * 16 > 0


def test_n_samples_share_the_prompt(server: Server, client: openai.OpenAI) -> None:
    body = {**PLAIN, "timings": True, "return_token_ids": True}

    def ask() -> list[str]:
        reply = client.completions.create(
            model="qwen3", prompt="abcdefgh" * 10, n=3, max_tokens=12, temperature=1.0, seed=5, extra_body=body
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        return [choice.text for choice in reply.choices]

    first = ask()
    assert len(set(first)) == 3, "samples of one seed differ from each other"
    assert ask() == first, "and are the same when asked again, from the cache"


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="qwen3", prompt="stop here", max_tokens=40, temperature=0.8, seed=11, extra_body=PLAIN
    )
    text = whole.choices[0].text
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable())
    cut = client.completions.create(
        model="qwen3", prompt="stop here", max_tokens=40, temperature=0.8, seed=11, stop=[stop], extra_body=PLAIN
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_prompts_at_once_and_echo(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="qwen3", prompt=["one", "two"], max_tokens=3, temperature=0, logprobs=1, echo=True, extra_body=PLAIN
    )
    assert [choice.text[:3] for choice in reply.choices] == ["one", "two"]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 6


def test_counts_in_every_event_and_many_samples(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="qwen3",
        prompt="count",
        max_tokens=5,
        n=16,
        best_of=16,
        stream=True,
        extra_body={**PLAIN, "stream_options": options},
    )
    counts = [chunk.usage.completion_tokens if chunk.usage else -1 for chunk in stream]
    assert counts == sorted(counts)
    assert counts[0] >= 1 and counts[-1] == 16 * 5


def test_a_prompt_is_scored_without_output(server: Server, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="qwen3", prompt="score me", max_tokens=0, echo=True, logprobs=1)
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    assert reply.choices[0].text == "score me"
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    for token, logprob, top in zip(
        (logprobs.tokens or [])[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == logprob <= max(top.values())
    body = {
        "text": "score me",
        "return_logprob": True,
        "logprob_start_len": 3,
        "sampling_params": {"max_new_tokens": 0},
    }
    scored = server.http.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    assert [logprob for logprob, _, _ in scored[1:]] == pytest.approx(logprobs.token_logprobs[4:], abs=1e-5)


def test_routes_that_other_servers_have(server: Server) -> None:
    assert server.http.get("/health_generate").status_code == 200
    server.wait_quiet()
    assert server.http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0
    path = server.http.get("/model_info").json()["model_path"]
    assert server.http.post("/v1/completions", json={"model": path, "prompt": "a"}).status_code == 200


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="qwen3", prompt="a" * 5000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_sets_everything_free(server: Server, client: openai.OpenAI) -> None:
    """In the middle of a stream, several times."""
    for turn in range(3):
        stream = client.completions.create(
            model="qwen3", prompt=f"{turn}" * 100, max_tokens=3000, temperature=0, stream=True, extra_body=PLAIN
        )
        for number, _ in enumerate(stream):
            if number == 5:
                break
        stream.close()
    server.wait_quiet()
    assert server.info()["engine"]["counts"]["failed_cancelled"] >= 3


def test_salts_do_not_share(server: Server) -> None:
    prompt = [200 - i for i in range(100)]
    hits = [server.complete(prompt, 4, cache_salt=salt).cached_len for salt in ("a", "b", "a", "b")]
    hits += [server.complete(prompt, 4).cached_len for _ in range(2)]
    assert hits == [0, 0, 96, 96, 0, 96]
    assert [server.complete(prompt, 4, no_cache=True).cached_len for _ in range(2)] == [0, 0]


def test_same_seed_same_tokens_with_and_without_caches(tiny_models: Path, folder: Path, server: Server) -> None:
    """Temperature, top-p, penalties: cold, from the caches, streamed at once, and on a server without caches."""
    fields = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.5, "seed": 123}
    prompt = [1 + i % 200 for i in range(90)]
    cold = server.complete(prompt, 40, **fields)
    warm = server.complete(prompt, 40, **fields)
    assert (cold.cached_len, warm.cached_len) == (0, 80)
    other = server.complete(prompt, 40, **{**fields, "seed": 124})
    assert other.tokens != cold.tokens
    with serving(folder, tiny_models / "qwen3", *FLAGS, "--disable-radix-cache") as bare:
        bare.complete(prompt, 4)
        plain = bare.complete(prompt, 40, **fields)
        assert plain.cached_len == 0
    assert cold.tokens == warm.tokens == plain.tokens
