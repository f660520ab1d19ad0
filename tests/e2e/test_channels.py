"""A real server whose model answers in gpt-oss's channels: reasoning and content apart, in a stream and in one piece.

The model writes one token after another as this file says: its layers add nothing, so each token decides the next.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from tokenizers import AddedToken

from tests.e2e.server import Server, serving
from tests.fixtures.harmony import BOS, TEMPLATE, harmony_tokenizer

WORDS = ("assistant", "analysis")
"""One token each, as in gpt-oss."""
ANSWER = ("assistant", "<|channel|>", "analysis", "<|message|>", "U", "m", "<|end|>", "H", "i", "!", "<|return|>")
"""Each is said behind the one before it; a prompt ends with the first."""
VOCAB = 272


def write_model(folder: Path) -> Path:
    tokenizer = harmony_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    ids = [tokenizer.token_to_id(token) for token in ANSWER]
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1.0 if "norm" in name else 0.0)
        for place, (token, following) in enumerate(pairwise(ids)):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.lm_head.weight[following, place] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder:
        (model := Path(folder) / "model").mkdir()
        with serving(Path(folder), write_model(model), "--page-size", "16", "--num-pages", "64") as server:
            yield server


def test_reasoning_and_content_come_apart(server: Server) -> None:
    """The answer ends at <|return|>, which no configuration of this model names."""
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    reply = server.http.post("/v1/chat/completions", json=body).json()
    [choice] = reply["choices"]
    reasoning = {"reasoning_content": "Um", "reasoning": "Um"}  # both names that clients read
    assert choice["message"] == {"role": "assistant", "content": "Hi!", **reasoning, "refusal": None}
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", len(ANSWER) - 1)
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]
    for name in ("content", *reasoning):
        assert "".join(delta.get(name, "") for delta in deltas) == choice["message"][name]
    said = {name: [place for place, delta in enumerate(deltas) if delta.get(name)] for name in choice["message"]}
    assert said["reasoning_content"][-1] <= said["content"][0], "equal where one event carries what came meanwhile"


def test_the_answer_can_be_sent_back(server: Server) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi!", "reasoning_content": "Um"},
        {"role": "user", "content": "hello"},
    ]
    reply = server.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
    assert reply.json()["choices"][0]["message"]["content"] == "Hi!"
